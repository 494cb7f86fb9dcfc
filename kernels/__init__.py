"""Kernels, installed as `hyper_parallel.kernels`; one package per kind of memory."""
