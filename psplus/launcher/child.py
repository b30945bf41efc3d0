"""One worker of `psplus.launch`: ``python -m psplus.launcher.child FOLDER``.

Runs what FOLDER/call.pkl says and leaves result.RANK or failure.RANK there. Ends with its parent:
standard input is a pipe that the parent holds open and never writes to.
"""

import os
import sys
import threading
import traceback
from pathlib import Path

import cloudpickle


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def main(folder: Path) -> int:
    """Run the call; 0, or 1 when it raised."""
    threading.Thread(target=_end_with_parent, name="psplus-launch", daemon=True).start()
    rank = os.environ["RANK"]
    try:
        function, arguments = cloudpickle.loads((folder / "call.pkl").read_bytes())
        result = cloudpickle.dumps(function(*arguments))
    except BaseException as error:
        sys.stdout.flush()
        (folder / f"failure.{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return 0
        return 1
    # Whole or not at all: the parent takes what is there when this process has ended.
    unfinished = folder / f"unfinished.{rank}"
    unfinished.write_bytes(result)
    unfinished.rename(folder / f"result.{rank}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
