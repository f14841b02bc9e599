"""Drift detectors for standardized calibration residuals, one class per file."""

from estimator_service.drift.base import DriftDetector
from estimator_service.drift.cusum import Cusum
from estimator_service.drift.page_hinkley import PageHinkley

__all__ = ["Cusum", "DriftDetector", "PageHinkley"]
