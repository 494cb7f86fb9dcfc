"""Training entry: ``python -m hyper_parallel.trainer CONFIG.yaml``, also under ``torchrun``.

``config`` reads the YAML, ``data`` the text, ``model`` is the plain model, ``dispatch`` and
``parallelize`` spread it over ranks, ``launch`` starts them, ``train`` is the loop and ``demo``
the measured end-to-end run behind ``make demo``.
"""
