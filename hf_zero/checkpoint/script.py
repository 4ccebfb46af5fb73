"""The small program that goes into checkpoint folders, where `./zero_to_fp32.py . pytorch_model.bin` runs it."""

from __future__ import annotations

ZERO_TO_FP32 = '''\
#!/usr/bin/env python
"""Ordinary weights from the sharded checkpoint in this folder:  ./zero_to_fp32.py . pytorch_model.bin  (or --help)."""

import sys

try:
    from hf_zero.zero_to_fp32 import main
except ImportError as error:
    sys.exit(f"this script needs hf_zero: pip install hf_zero ({error})")

if __name__ == "__main__":
    sys.exit(main())
'''
