"""Tests of `bankfull.serve.replicas`."""
