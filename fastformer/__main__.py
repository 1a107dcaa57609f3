"""`fastformer`, `python -m fastformer`, and `torchrun … -m fastformer`."""

import signal


def main() -> None:
    """Run the command line; a Ctrl-C while it is imported, for seconds, ends the process without a traceback."""
    at_ctrl_c = signal.getsignal(signal.SIGINT)
    if at_ctrl_c is signal.default_int_handler:  # not where nohup, or a shell's &, has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fastformer.apps.cli import main as run

    signal.signal(signal.SIGINT, at_ctrl_c)
    run()


if __name__ == "__main__":
    main()
