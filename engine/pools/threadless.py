"""Imported in a zygote before what others wrote: pandas and pyarrow start threads, which it must not have.

They are optional where they are imported, and count as not installed.
"""

import sys

for _name in ("pandas", "pyarrow"):
    if _name not in sys.modules:
        sys.modules[_name] = None  # type: ignore[assignment]
