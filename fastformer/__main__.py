"""`fastformer`, `python -m fastformer`, and `torchrun … -m fastformer`."""

import signal
import sys


def main() -> None:
    """Run the command line; a Ctrl-C while it is imported, or when it is over, ends the process without a traceback.

    Both take seconds.
    """
    at_ctrl_c = signal.getsignal(signal.SIGINT)
    ends = at_ctrl_c is signal.default_int_handler  # not where nohup, or a shell's &, has it ignored
    if ends:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fastformer.apps.cli import main as run

    signal.signal(signal.SIGINT, at_ctrl_c)
    try:
        run()
    except KeyboardInterrupt:  # a second one, while what is left of the output waits for its reader
        sys.exit(130)
    finally:
        if ends:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
