# make demo / make test are the two commands for a fresh machine; `make help` lists the rest, V=1 shows the
# compiler's calls.
SAN     ?=
BUILD   ?= build$(if $(SAN),-san)
ifeq ($(origin CC),default)
CC      := gcc
endif
PREFIX  ?= /usr/local
PYTHON  := .venv/bin/python

PKGS    := libuv libcurl libmicrohttpd jansson sqlite3 openblas libcrypto
WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wformat=2 -Wswitch-enum -Werror
CFLAGS  ?= -O2 -g
KA_CFLAGS = -std=c11 -D_GNU_SOURCE -I. $(WARN) $(CFLAGS) \
            $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer) \
            $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
KA_LIBS   = -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/../lib' \
            $(shell pkg-config --libs $(PKGS) 2>/dev/null) -lm -lpthread

LIB_SRC  := $(filter-out agent/cli/main.c,$(wildcard base/*.c sandbox/*.c rag/*.c agent/*/*.c))
LIB_OBJ  := $(LIB_SRC:%.c=$(BUILD)/%.o)
JAIL_SRC := $(wildcard sandbox/jail/*.c)
JAIL_OBJ := $(JAIL_SRC:%.c=$(BUILD)/%.o) $(if $(SAN),$(BUILD)/tests/san/jail.o)
UNIT     := $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(wildcard tests/unit/test_*.c))
# Parsers of outside bytes, and what they are built on: half of the library.
FUZZ_SRC := $(filter base/% sandbox/% rag/% agent/core/%,$(LIB_SRC)) agent/app/conf.c agent/disk/modules.c \
            agent/io/loop.c agent/io/mailbox.c
FUZZ     := $(patsubst tests/fuzz/%.c,$(BUILD)/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))
Q        := $(if $(V),,@)
CPUS     := $(shell nproc 2>/dev/null || echo 2)
ALL_CPUS := -j$(CPUS)
PY_DIRS  := sandbox dataset examples tests scripts
PROGRAMS := $(BUILD)/kernel-agent $(BUILD)/ka-jail $(BUILD)/libka_jail.so

all: $(PROGRAMS)   ## build the program and its jail

# What `make test` takes of the longer suites.
ATTACKS_SHORT := row  ?(2|4|8|9|13|18|20) |control (scale|softmax)
PAIRS_SHORT   := /(rms_norm_rowgroup|softmax_row_single|huber_mean|cumsum_row|rope_half|embedding_atomic)
MUTANTS_SHORT := dataset/norm/l2_normalize_rows.py dataset/reduction_softmax/softmax_row_single_tile.py

# ---- the two commands

demo: setup   ## set up, build, and complete examples/softmax.py with a verified backward
	@$(MAKE) --no-print-directory $(ALL_CPUS) all store
	$(BUILD)/kernel-agent --file-path examples/softmax.py --print

test: setup   ## set up, build, and pass the tests: all but the slow ones
	@$(MAKE) --no-print-directory $(ALL_CPUS) all store
	@$(MAKE) --no-print-directory $(ALL_CPUS) $(UNIT)
	@$(MAKE) --no-print-directory $(ALL_CPUS) unit fuzz-build
	@$(MAKE) --no-print-directory -j3 --output-sync=target beside-jail fuzz-quick jail CHECKS=50 FUZZ_SECONDS=2
	@$(MAKE) --no-print-directory pytest SLOW=leave

test-slow: setup   ## the tests that take over five seconds each (tests/slow_tests.txt)
	@$(MAKE) --no-print-directory $(ALL_CPUS) all store
	@$(MAKE) --no-print-directory pytest SLOW=only

# The jail's tests mostly wait, and fuzz targets run one at a time, for seconds each.
beside-jail:
	@$(MAKE) --no-print-directory attacks ATTACKS='$(ATTACKS_SHORT)'
	@$(MAKE) --no-print-directory verify-dataset ONLY='$(PAIRS_SHORT)' JOBS=2 OUT=generated/pairs.json

setup:   ## install what is missing: Debian packages and .venv
	@scripts/setup.sh

# ---- building

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(KA_CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/agent/serve/web.o: agent/serve/page/index.html

# What passes over every element of every tensor: loops that are worth vectors.
ifeq ($(SAN),)
$(patsubst %,$(BUILD)/sandbox/%.o,tensor compare_measure compare_norm): CFLAGS += -O3 \
    $(if $(filter x86_64,$(shell uname -m)),-DKA_CLONE)
endif

$(BUILD)/libka.a: $(LIB_OBJ)
	$(Q)rm -f $@
	$(Q)ar rcs $@ $^

$(BUILD)/kernel-agent: $(BUILD)/agent/cli/main.o $(BUILD)/libka.a
	@echo '  link $@'
	$(Q)$(CC) $(KA_CFLAGS) $^ -o $@ $(KA_LIBS)

$(BUILD)/ka-jail: $(JAIL_OBJ)
	@echo '  link $@'
	$(Q)$(CC) $(KA_CFLAGS) $^ -o $@

# The same jail, for the children that a warm interpreter forks.
$(BUILD)/pic/%.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(filter-out -fsanitize=% -fno-omit-frame-pointer,$(KA_CFLAGS)) -fPIC -MMD -MP -c $< -o $@

$(BUILD)/libka_jail.so: $(filter-out $(BUILD)/pic/sandbox/jail/ka_jail.o,$(JAIL_SRC:%.c=$(BUILD)/pic/%.o))
	@echo '  link $@'
	$(Q)$(CC) -shared $^ -o $@

$(BUILD)/tests/%: tests/unit/%.c $(BUILD)/libka.a
	@mkdir -p $(@D)
	@echo '  link $@'
	$(Q)$(CC) $(KA_CFLAGS) -MMD -MP $< $(BUILD)/libka.a -o $@ $(KA_LIBS) -lcmocka

store: $(BUILD)/pairs.db   ## build the pair store from dataset/

$(BUILD)/pairs.db: $(BUILD)/kernel-agent $(shell find dataset -name '*.py' 2>/dev/null)
	$(BUILD)/kernel-agent store build dataset --store $@

# ---- testing

unit: $(UNIT) $(PROGRAMS)   ## C unit tests
	@for t in $(UNIT); do $$t || exit 1; done

# Each start of the program in a home of its own would compile the package anew.
pytest: $(PROGRAMS) store   ## Python tests, and end-to-end tests of the program (SLOW=leave|only)
	$(PYTHON) -m compileall -q sandbox/kernel_agent
	KA_BUILD=$(abspath $(BUILD)) $(PYTHON) -m pytest -q -n $$(($(CPUS) + 1)) --dist worksteal \
	    -p tests.told_at_once -p tests.slow_tests $(if $(SLOW),--slow=$(SLOW)) tests/python tests/e2e

slow-list:   ## run all Python and end-to-end tests, and write tests/slow_tests.txt anew
	@$(MAKE) --no-print-directory pytest SLOW=list

jail: $(PROGRAMS)   ## every way out of the jail, tried (CHECKS=1000 checks in a row at the end)
	$(PYTHON) tests/jail/run.py --jail $(BUILD)/ka-jail --checks $(or $(CHECKS),1000)

soak: $(PROGRAMS) store   ## the service under faults and kills (RUNS=300 SECONDS=1800 RESULT=F.json)
	$(PYTHON) tests/soak/run.py --build $(BUILD) --runs $(or $(RUNS),300) --seconds $(or $(SECONDS),1800) \
	    $(if $(RESULT),--out $(RESULT))

slurm: $(PROGRAMS) store   ## scripts/slurm on a cluster of this machine, where Slurm is installed
	$(PYTHON) tests/slurm/run.py --build $(BUILD) $(if $(REPORT),--report $(REPORT))

systemd: $(PROGRAMS) store   ## the unit under a systemd in a container, where one boots (RESULT=F.json)
	$(PYTHON) tests/systemd/run.py --build $(BUILD) $(if $(RESULT),--out $(RESULT))

attacks: $(PROGRAMS)   ## every attack on the verdict must be rejected (ATTACKS='row  3|control' picks)
	$(PYTHON) tests/attacks/run.py --build $(BUILD) --only '$(ATTACKS)'

prompt-eval: $(PROGRAMS) store   ## is what the model needs in each question? (NAMES='kepler resample' picks)
	$(PYTHON) scripts/prompt_eval.py --build $(BUILD) $(NAMES)

mutants: $(PROGRAMS)   ## wrong versions of right backwards, all to be rejected (MUTANTS=8: so many)
	$(PYTHON) tests/attacks/mutate.py --build $(BUILD) $(if $(MUTANTS),--sample $(MUTANTS) $(MUTANTS_SHORT))

verify-dataset: $(PROGRAMS)   ## the verdict on every pair (DEVICE=cuda DTYPE=own ONLY=REGEX JOBS=1 RESUME=1)
	$(PYTHON) scripts/verify_dataset.py --program $(BUILD)/kernel-agent --only '$(ONLY)' \
	    --device $(or $(DEVICE),cpu) --dtype $(or $(DTYPE),float32) --jobs $(or $(JOBS),1) \
	    --out $(or $(OUT),bench/results/dataset-$(or $(DEVICE),cpu).json) $(if $(RESUME),--resume)

published: $(PROGRAMS)   ## the verdict on tests/published (PUBLISHED='tests/published/k*.py' picks)
	@mkdir -p generated
	$(PYTHON) scripts/check_all.py --program $(BUILD)/kernel-agent --jobs 2 --out generated/published.json \
	    --runs generated/published $(or $(PUBLISHED),$(sort $(wildcard tests/published/*.py)))

LITELLM := litellm[proxy]==1.106.2
llm-proxy: $(PROGRAMS) store   ## install LiteLLM's proxy into build/llm-proxy, and test the program behind it
	test -x $(BUILD)/llm-proxy/bin/litellm || \
	    { python3 -m venv $(BUILD)/llm-proxy && $(BUILD)/llm-proxy/bin/pip install -q '$(LITELLM)'; }
	KA_BUILD=$(abspath $(BUILD)) KA_LITELLM=$(abspath $(BUILD))/llm-proxy/bin/litellm \
	    $(PYTHON) -m pytest -q -rs tests/e2e/test_llm_proxy.py

diff-matrix: $(PROGRAMS)   ## what the differentiator can do alone: staged kernels and examples, as a table
	$(PYTHON) scripts/diff_matrix.py --program $(BUILD)/kernel-agent

gpu: $(PROGRAMS) store   ## what only a GPU can show (PARTS=norm,row picks, WHOLE=1: no samples, NAME=h200)
	python3 scripts/gpu.py --python "$$(command -v python3)" \
	    --out bench/results/gpu-$(or $(NAME),gpu).json $(if $(PARTS),--only $(PARTS)) $(if $(WHOLE),--whole)

property:   ## random kernels, wrappers (COUNT=2000 WRAPPERS=500 SEQUENCES=100 SEED=0 JOBS=1 RESULT=F.json)
	$(PYTHON) tests/property/run.py --kernels $(or $(COUNT),2000) --wrappers $(or $(WRAPPERS),500) \
	    --sequences $(or $(SEQUENCES),100) \
	    --seed $(or $(SEED),0) --jobs $(or $(JOBS),1) $(if $(RESULT),--out $(RESULT))

# The interpreter's process has no sanitizer: libka_jail.so is built without. tests/san/jail.c says what
# ka-jail does without.
check:   ## C unit tests, Python and end-to-end tests under sanitizers (SAN=address,undefined)
	@$(MAKE) --no-print-directory setup
	@$(MAKE) --no-print-directory all store unit pytest SAN=$(or $(SAN),address,undefined) BUILD=build-san

# ---- benchmarks

bench: $(BUILD)/tests/bench_search $(PROGRAMS) store   ## search, embedding, memory, time per turn
	$(PYTHON) scripts/bench.py --build $(BUILD) --out bench/results/bench-cpu.json

retrieval: $(PROGRAMS) store   ## how often a search finds a pair that helps, beside other methods
	$(PYTHON) scripts/retrieval.py --program $(BUILD)/kernel-agent --store $(BUILD)/pairs.db \
	    --out bench/results/retrieval.json

bench-all: $(PROGRAMS) store   ## on a GPU: drafts beside torch.compile (OUT=F.json ONLY=REGEX RESUME=1)
	$(PYTHON) scripts/bench_all.py --program $(BUILD)/kernel-agent --only '$(ONLY)' \
	    --out $(or $(OUT),bench/results/bench-gpu.json) $(if $(RESUME),--resume)

bench-jail: $(PROGRAMS)   ## cold and warm starts, layers, cached kernels
	$(PYTHON) scripts/bench_jail.py --jail $(BUILD)/ka-jail --out bench/results/jail-latency-cpu.json

bench-service: $(PROGRAMS) store   ## a thousand queued runs: submissions, latencies, memory
	$(PYTHON) scripts/bench_service.py --build $(BUILD) --out bench/results/service.json

bench-verdict: $(PROGRAMS)   ## what a verdict costs beside one forward and backward
	$(PYTHON) scripts/bench_verdict.py --build $(BUILD) --out bench/results/verdict-time-cpu.json

bench-compare: $(BUILD)/tests/bench_compare   ## nanoseconds that comparing an element takes
	@for dtype in F32 F16 BF16 F64; do $< 8388608 $$dtype || exit 1; done

$(BUILD)/tests/bench_%: tests/bench/bench_%.c $(BUILD)/libka.a
	@mkdir -p $(@D)
	@echo '  link $@'
	$(Q)$(CC) $(KA_CFLAGS) -MMD -MP $< $(BUILD)/libka.a -o $@ $(KA_LIBS)

# ---- other checks

valgrind: setup   ## the C unit tests under valgrind
	@$(MAKE) --no-print-directory $(UNIT)
	@for t in $(UNIT); do echo "== $$t"; \
	    valgrind -q --error-exitcode=1 --leak-check=full --errors-for-leak-kinds=definite,indirect $$t \
	    || exit 1; done

lint: setup   ## formatting, ruff, types, the order of the house, shell scripts, a build with clang
	clang-format --dry-run -Werror $(shell git ls-files '*.c' '*.h')
	$(PYTHON) -m ruff check -q $(PY_DIRS)
	$(PYTHON) -m ruff format -q --check $(PY_DIRS)
	$(PYTHON) -m mypy sandbox/kernel_agent
	$(PYTHON) scripts/house.py
	shellcheck scripts/*.sh scripts/completion.bash .ci/run
	@$(MAKE) --no-print-directory all BUILD=build-clang CC=clang

$(BUILD)/fuzz/%: tests/fuzz/%.c $(BUILD)/libka.a
	@mkdir -p $(@D)
	@echo '  link $@'
	$(Q)$(CC) $(KA_CFLAGS) -fsanitize=fuzzer $< $(BUILD)/libka.a -o $@ $(KA_LIBS)

fuzz-build: setup
	@$(MAKE) --no-print-directory $(FUZZ:$(BUILD)/%=build-fuzz/%) BUILD=build-fuzz CC=clang \
	    LIB_SRC='$(FUZZ_SRC)' \
	    SAN=fuzzer-no-link,address,undefined CFLAGS='-O1 -g -fno-sanitize-recover=undefined'

fuzz-quick: fuzz-build   ## every fuzz target for FUZZ_SECONDS each
	@for t in $(notdir $(FUZZ)); do mkdir -p build-fuzz/corpus/$$t && \
	    build-fuzz/fuzz/$$t -max_total_time=$(or $(FUZZ_SECONDS),20) -print_final_stats=1 -verbosity=0 \
	    build-fuzz/corpus/$$t || exit 1; done

# ---- installing

install: all store   ## install below PREFIX
	install -d $(addprefix $(DESTDIR)$(PREFIX)/,bin share/kernel-agent share/man/man1 \
	    share/man/man5 share/doc/kernel-agent lib/systemd/system \
	    lib/sysusers.d share/bash-completion/completions share/zsh/site-functions)
	install -m 755 $(PROGRAMS) $(DESTDIR)$(PREFIX)/bin
	cp -r prompts sandbox dataset examples $(DESTDIR)$(PREFIX)/share/kernel-agent/
	install -m 644 $(BUILD)/pairs.db $(DESTDIR)$(PREFIX)/share/kernel-agent/pairs.db
	find $(DESTDIR)$(PREFIX)/share/kernel-agent -name __pycache__ -prune -exec rm -rf {} +
	install -m 644 docs/kernel-agent.1 $(DESTDIR)$(PREFIX)/share/man/man1/
	install -m 644 docs/kernel-agent.5 $(DESTDIR)$(PREFIX)/share/man/man5/
	install -m 644 docs/config.sample $(DESTDIR)$(PREFIX)/share/doc/kernel-agent/
	sed 's|/usr/local/bin|$(PREFIX)/bin|' scripts/kernel-agent.service \
	    > $(DESTDIR)$(PREFIX)/lib/systemd/system/kernel-agent.service
	install -m 644 scripts/kernel-agent.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/kernel-agent.conf
	install -m 644 scripts/completion.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/kernel-agent
	install -m 644 scripts/completion.zsh $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_kernel-agent

dist: all store   ## a tarball with the libraries it needs, for a machine without -dev packages
	scripts/dist.sh $(BUILD)

clean:   ## remove what was built
	rm -rf build build-san build-clang build-fuzz dist

help:   ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 16

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
.PHONY: all demo test test-slow slow-list setup store unit pytest jail attacks mutants verify-dataset
.PHONY: published diff-matrix bench-all gpu property check prompt-eval soak slurm systemd bench-service
.PHONY: llm-proxy beside-jail bench retrieval bench-jail bench-verdict bench-compare valgrind
.PHONY: lint fuzz-build fuzz-quick install dist clean help
