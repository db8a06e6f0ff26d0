"""`python -m benchmarks.peers`."""

import signal
import sys

from benchmarks.peers.command import main

if __name__ == "__main__":
    # Ended by a signal, it still ends the engines that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
