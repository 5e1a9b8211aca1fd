"""How a script ends if a setting or file of its user is wrong: with the message of the error, and no traceback."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb


PACKAGE = Path(__file__).resolve().parents[1]


def run_script(main: Callable[[], None]) -> None:
    """Call `main`. An error about a setting or a file that this package raises ends the process with its message alone.

    Every other error keeps its traceback, which is needed to find a bug: those that libraries raise, and other kinds.
    """
    try:
        main()
    except KeyboardInterrupt:
        # Trainings save a checkpoint first. What the others have finished stays.
        print("Stopped: the same command goes on with what is left.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, ImportError, RuntimeError, FloatingPointError) as error:
        script, place = Path(sys.argv[0]), Path(extract_tb(error.__traceback__)[-1].filename).resolve()
        if place != script.resolve() and not place.is_relative_to(PACKAGE):
            raise
        sys.exit(f"{script.name}: {error}")
