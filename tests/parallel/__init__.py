"""Models that are split over ranks."""
