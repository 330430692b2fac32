# Every target but up and down works without Docker: tests and demos get their
# servers from internal/servers.

MODULES      := . pgx internal/integration internal/bench _examples
WITH_SERVERS := go run ./internal/servers/withservers
STATICCHECK  := go run honnef.co/go/tools/cmd/staticcheck@v0.8.2
TEST_FLAGS   ?=
DEMO_FLAGS   ?=
BENCH_FLAGS  ?=
TORTURE_FLAGS ?=
FUZZ_TIME    ?= 20s

# Tests of broken broker connections, where watermill-amqp v2.1.3 has data races of its own.
WITHOUT_RACE := echo "== internal/integration: tests without the race detector" && \
	(cd internal/integration && go test -count=1 -run Cut ./amqp)

# each runs a command in every module, also after one has failed.
each = failed=; for module in $(MODULES); do \
	echo "== $$module: $(1)"; (cd $$module && $(1)) || failed="$$failed $$module"; \
	done; test -z "$$failed" || { echo "failed in:$$failed" >&2; exit 1; }

# newest_amqp runs the AMQP tests once more with the newest RabbitMQ client, in a copy of the module's go.mod: the go.mod
# files ask for the oldest one that works, and a user's program may have any. From v1.11 on it honours a message's context.
NEWEST_AMQP ?= v1.16.0
newest_amqp = (echo "== internal/integration/amqp with amqp091-go $(NEWEST_AMQP)"; cd internal/integration && folder=$$(mktemp -d) && \
	trap "rm -rf $$folder" EXIT && cp go.mod go.sum "$$folder" && \
	sed -i "s|=> \.\./\.\.|=> $(CURDIR)|" "$$folder/go.mod" && \
	go get -modfile="$$folder/go.mod" github.com/rabbitmq/amqp091-go@$(NEWEST_AMQP) && \
	go test -modfile="$$folder/go.mod" -race -count=1 $(TEST_FLAGS) ./amqp)

# released_pgx builds the last release of the pgx module against this root: who upgrades one of the two first must not
# get a riddle.
released_pgx = (echo "== pgx as it was released last"; tag=$$(git tag --list "pgx/v*" --sort=-v:refname | head -n 1); \
	test -n "$$tag" || { echo "there is no release yet"; exit 0; }; echo "$$tag"; \
	folder=$$(mktemp -d) && trap "rm -rf $$folder" EXIT && git archive "$$tag" pgx | tar -x -C "$$folder" && \
	cd "$$folder/pgx" && go mod edit -replace github.com/devmappa/watermill-inbox=$(CURDIR) && go vet -mod=mod ./...)

# fuzz runs every fuzz target of every module for $(1), also after one has failed. A number of executions (300x) has
# no deadline, which in Go 1.26 can fail a target that is slow. The targets are found in the
# source; each package is compiled once, with $(2), and keeps what it finds interesting in $(3). An input that
# fails is written to the package's testdata/fuzz. Few workers, because each opens databases of its own.
fuzz = (failed=; folder=$$(mktemp -d) && trap "rm -rf $$folder" EXIT && \
	for package in $$(grep -rl "^func Fuzz" --include=*_test.go . | xargs -n 1 dirname | sort -u); do \
	(cd $$package && go test -c -o $$folder/fuzz $(2) .) || { failed="$$failed $$package"; continue; }; \
	for target in $$(cat $$package/*_test.go | grep -o "^func Fuzz[A-Za-z0-9_]*" | cut -c 6-); do \
	echo "== $$package: $$target for $(1)"; (cd $$package && $$folder/fuzz -test.run "^$$" -test.fuzz "^$$target$$" \
	-test.fuzztime $(1) -test.fuzzcachedir $(3)/$$package -test.parallel 2) || failed="$$failed $$package/$$target"; \
	done; done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; })

# heavy lists tracked files over 500 kB and those of an executable format (ELF, Mach-O, PE): build results that were added
# by mistake, which stay in everybody's clone for ever.
heavy = for file in $$(git ls-files); do \
	case "$$(head -c 4 "$$file" | od -An -tx1 | tr -d " \n")" in 7f454c46|cffaedfe|cefaedfe|cafebabe|4d5a*) echo "$$file: executable"; esac; \
	test "$$(wc -c < "$$file")" -le 500000 || echo "$$file: more than 500 kB"; \
	done

.DEFAULT_GOAL := help
.PHONY: help test test_short test_race fuzz torture bench lint up down demo demo-amqp demo-outbox

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z_-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: ## all modules against real servers, with the race detector; gets the servers itself
	$(WITH_SERVERS) sh -c '$(call each,go test -race -count=1 -p 1 -timeout 30m $(TEST_FLAGS) ./...) && $(WITHOUT_RACE) && $(newest_amqp) && $(released_pgx) && \
		$(call fuzz,300x,-race,$$folder/cache)'

fuzz: ## fuzz every target for FUZZ_TIME (20s), compiled for it, which takes minutes once; the corpus runs in make test as well
	$(WITH_SERVERS) sh -c '$(call fuzz,$(FUZZ_TIME),-fuzz=.,$$(go env GOCACHE)/fuzz/watermill-inbox)'

test_short: ## the root module without servers
	go test -short $(TEST_FLAGS) ./...

test_race: test ## the same as test, under Watermill's name for it

demo-outbox: ## an inbox, an outbox, a forwarder and a second inbox, with processes and the broker killed
	cd _examples/outbox && go run . -orders 1000 -timeout 10m $(DEMO_FLAGS)

torture: ## break everything around consumers for 10 minutes (-time), and wrong inboxes too; on servers of its own
	go run -C internal/integration ./torture $(TORTURE_FLAGS)

bench: ## compare with a plain transaction and a hand-written inbox, side by side; prints ratios, draws a chart
	$(WITH_SERVERS) go run -C internal/bench . $(BENCH_FLAGS)

lint: ## gofmt, no build results in git, and vet, staticcheck and tidy check in every module
	@echo "== gofmt -l ."; unformatted=$$(gofmt -l .); echo "$$unformatted"; test -z "$$unformatted"
	@echo "== tracked files that are too heavy"; heavy=$$($(heavy)); echo "$$heavy"; test -z "$$heavy"
	@$(call each,go vet ./...)
	@$(call each,$(STATICCHECK) ./...)
	@$(call each,go mod tidy -diff)

up: ## PostgreSQL and RabbitMQ in containers on their standard ports
	docker compose up --detach --wait

down: ## remove these containers and their data
	docker compose down --volumes

demo: ## the main job on SQLite and GoChannel, with and without the inbox; no server
	@echo "The first build takes a while."
	cd _examples/quickstart && go run .

demo-amqp: ## the same on real RabbitMQ and PostgreSQL, with a consumer killed in the middle
	$(WITH_SERVERS) go run ./internal/demo $(DEMO_FLAGS)
