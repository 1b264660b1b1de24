"""Differences in units of the dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

TOLERANCE = 32  # ulp


def ulps(found: Any, expected: Any) -> float:
    """The largest difference, in ulp: 2**-23 of the largest magnitude expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max() * 2.0**23)
