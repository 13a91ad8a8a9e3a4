"""``python -m triton_kernel_lab``, which the stages of dvc.yaml call."""

from triton_kernel_lab.cli import main

main()
