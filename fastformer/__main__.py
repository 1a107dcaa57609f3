"""`fastformer`, `python -m fastformer`, and `torchrun … -m fastformer`."""

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C during its import or after its end exits the process without a traceback.

    Import and shutdown can take seconds.
    """
    sigint_handler = signal.getsignal(signal.SIGINT)
    is_default = sigint_handler is signal.default_int_handler  # False if nohup, or a shell's &, ignores SIGINT
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fastformer.apps.cli import main as run

    signal.signal(signal.SIGINT, sigint_handler)
    try:
        run()
    except KeyboardInterrupt:  # a second Ctrl-C, while remaining output waits for a pipe's reader
        sys.exit(130)
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
