"""How a script ends if something that a user gave it is wrong: with the error's message, and no traceback above it."""

import sys
from collections.abc import Callable
from dis import opmap
from pathlib import Path


def run_script(main: Callable[[], None]) -> None:
    """Call `main`. If this package refuses a setting or a file, the process ends with status 1 and the message alone.

    Every other error keeps its traceback, which is needed to find a bug: those of libraries, and those that Python
    itself raises in the code of this package, such as a KeyError.

    Example:

    ```python
    if __name__ == "__main__":
        run_script(main)
    ```
    """
    try:
        main()
    except KeyboardInterrupt:
        # Trainings save a checkpoint first. What the others have finished stays.
        sys.exit("Stopped: the same command goes on with what is left.")
    except Exception as error:
        if not _refused_here(error):
            raise
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def _refused_here(error: Exception) -> bool:
    """Whether a `raise` statement of this package, or of the script itself, raised the error.

    From another process only the error arrives, without the place where it was raised: then its class must be ours.
    """
    if type(error).__module__.partition(".")[0] == "neobert_hf":
        return True
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    ours = frame.f_globals.get("__name__", "").partition(".")[0] in ("neobert_hf", "__main__")
    # The instruction that raised. An `assert` has the same one, and is never about what a user gave.
    raised = frame.f_code.co_code[traceback.tb_lasti] == opmap["RAISE_VARARGS"]
    return ours and raised and not isinstance(error, AssertionError)
