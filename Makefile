# `make cpu`, `make repro`, any session of noxfile.py; `make gate ARGS="--base main"` passes arguments.
PYTHON ?= python3
NOX := .venv/bin/nox

list: $(NOX)
	@$(NOX) --list
%: $(NOX) always
	@$(NOX) -s $@ $(if $(ARGS),-- $(ARGS))
$(NOX): constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt nox
	@touch $@
always: ;
Makefile constraints.txt: ;
.PHONY: list always
