"""Work in a fork of this process, which has loaded everything, so that it starts at once and can be killed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from tqdm import tqdm


def forked(work: Callable[[], object]) -> int:
    """The pid of a fork that does ``work``; its status is 0 where that ended by itself and well."""
    child = os.fork()
    if child:
        return child
    # Forks share the semaphore of tqdm's own lock: one killed while it holds that would stop all that come after it.
    tqdm.set_lock(threading.RLock())
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)
