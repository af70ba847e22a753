from samestep.runtime.hosts import group_by_host


def test_ranks_that_see_each_other_are_on_one_host():
    found = group_by_host([["boot a", 7], ["boot b", 7], ["boot a", 8]])
    assert found.hosts == ((0, 2), (1,))
    assert found.processes == (7, 7, 8)


def test_ranks_that_cannot_say_where_they_are_are_alone_even_with_one_process_number():
    assert group_by_host([[None, 1], [None, 1], ["boot a", 1]]).hosts == ((0,), (1,), (2,))
