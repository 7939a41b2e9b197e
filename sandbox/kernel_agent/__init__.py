"""kernel-agent's Python side: the `autodiff` mark for users' files, and what runs inside the jail.

Importing this package imports neither torch nor Triton.
"""

from .autodiff import autodiff

__version__ = "0.1.0"
__all__ = ["autodiff"]
