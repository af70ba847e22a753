"""What several tests of the replicas need."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """As the ranks have: how a sum is cut among threads shows in its last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
