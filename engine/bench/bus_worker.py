"""One side of one case of the bus benchmark, in its own process.

It prints ``ready``, waits for a line, does its job and prints its outcome as JSON. The measuring process
starts it as ``python -m engine.bench.bus_worker JOB``; it ends with that process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import msgspec

from engine.bench.bus_job import Job

_SET_PDEATHSIG = 1


def main() -> None:
    """Do the job in the first argument (JSON)."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if job.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, job.cores)
    if job.transport == "ceiling":
        from engine.bench.bus_ceilings import run
    else:
        from engine.bench.bus_sides import run
    print(msgspec.json.encode(run(job)).decode(), flush=True)


if __name__ == "__main__":
    main()
