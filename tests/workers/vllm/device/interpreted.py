"""Run a file of tests under Triton's interpreter: ``python -m tests...interpreted FILE``.

`test_interpreted` starts it. In a process of its own, because the interpreter is chosen when Triton
is imported, and for good.
"""

import sys

import pytest

from tests.workers.vllm.device.interpreter import interpret


def main() -> int:
    """Returns pytest's exit status."""
    # How long all of it may take is the starter's to say.
    # vLLM, and numpy in the interpreter, warn of much that is none of ours.
    return pytest.main(
        ["-q", "-rs", "--timeout=0", "-W", "default", "-p", "no:cacheprovider", *sys.argv[1:]]
    )


# Also in the processes that an engine starts for its ranks, which import what started them.
if __name__ in {"__main__", "__mp_main__"}:
    interpret()
if __name__ == "__main__":
    sys.exit(main())
