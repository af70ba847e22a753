import threading

from samestep.runtime.process_group.work import WorkerThread


def test_what_is_added_after_the_end_is_done_all_the_same():
    """A collective that ends as its group is destroyed still has callbacks to be called."""
    worker, done = WorkerThread("tested"), threading.Event()
    worker.add(lambda: None)
    thread = worker._thread
    worker.close()
    thread.join(10)
    worker.add(done.set)
    assert done.wait(10)


def test_things_are_done_one_after_another_in_their_order():
    worker, found, done = WorkerThread("tested"), [], threading.Event()
    for number in range(100):
        worker.add(lambda number=number: found.append(number))
    worker.add(done.set)
    assert done.wait(10)
    worker.close()
    assert found == list(range(100))
