"""`python -m nvfp4 VERB`, which is also what `torchrun ... -m nvfp4 VERB` runs."""

import sys

from nvfp4.cli import main

if __name__ == "__main__":  # Megatron's checkpoint writers import this module again
    sys.exit(main())
