"""Training entry: ``python -m hyper_parallel.trainer CONFIG.yaml``, also under ``torchrun``.

``yaml_file`` reads the YAML, ``config`` checks it, ``data`` reads the text, ``model`` is the plain
model, ``dispatch`` and ``parallelize`` spread it over ranks, ``launch`` starts them, ``train`` is
the loop, ``demo`` the measured end-to-end run behind ``make demo``, and ``command_line`` what
commands share.
"""
