"""Apex's interfaces over fusedtrain's kernels."""
