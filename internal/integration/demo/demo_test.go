//go:build unix

// Package demo runs internal/demo, as make demo-amqp does, with few payments.
package demo

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

const (
	payments  = 60
	copies    = 3
	malformed = 3
)

func TestInbox(t *testing.T) {
	output, status := runDemo(t)
	if status != 0 || !strings.Contains(output, "OK: each of 60 payments was booked once.") {
		t.Errorf("status %d, want 0 and every payment booked once", status)
	}
	table := parseTable(t, output)
	for name, want := range map[string]string{
		"published messages":    strconv.Itoa(payments*copies + malformed),
		"ledger rows":           strconv.Itoa(payments),
		"sum of the ledger":     table["sum of the ledger"].expected,
		"sum of the accounts":   table["sum of the ledger"].expected,
		"poison queue messages": strconv.Itoa(malformed),
		"left in the queue":     "0",
	} {
		if got := table[name].counted; got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	for name, least := range map[string]int{
		"deliveries logged":  payments*copies + malformed,
		"handler runs":       payments + malformed,
		"duplicates skipped": payments * (copies - 1),
	} {
		if got := table.number(t, name); got < least {
			t.Errorf("%s: %d, want at least %d", name, got, least)
		}
	}
	checkStory(t, output)
}

func TestNaive(t *testing.T) {
	output, status := runDemo(t, "-naive")
	if status != 1 || !strings.Contains(output, "DOUBLE CHARGE: without the inbox, 60 of 60 payments") {
		t.Errorf("status %d, want 1 and every payment booked more than once", status)
	}
	table := parseTable(t, output)
	if rows := table.number(t, "ledger rows"); rows < payments*copies {
		t.Errorf("ledger rows: %d, want at least %d", rows, payments*copies)
	}
	if sum := table["sum of the ledger"]; sum.counted == sum.expected {
		t.Errorf("the ledger's sum is right: %s", sum.counted)
	}
	if poisoned := table.number(t, "poison queue messages"); poisoned != malformed {
		t.Errorf("poison queue messages: %d, want %d", poisoned, malformed)
	}
	checkStory(t, output)
}

// checkStory checks that what the table is about has happened.
func checkStory(t *testing.T, output string) {
	t.Helper()
	for _, part := range []string{
		"killed (SIGKILL)", "stopped (SIGTERM)", "with status 0", "both started again", "queue empty",
	} {
		if !strings.Contains(output, part) {
			t.Errorf("%q is not in the output", part)
		}
	}
}

// runDemo builds the driver, runs it and returns what it prints and its status. The consumers that the
// driver builds get the race detector when the test has it; a race gives them a status that fails the demo.
func runDemo(t *testing.T, args ...string) (output string, status int) {
	t.Helper()
	for _, variable := range []string{"WATERMILL_TEST_POSTGRES_URL", "WATERMILL_TEST_AMQP_URI"} {
		if os.Getenv(variable) == "" {
			t.Fatalf("%s is not set; run the tests by make test, which starts a server", variable)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	environ := os.Environ()
	if raceEnabled {
		environ = append(environ, "GOFLAGS="+strings.TrimSpace(os.Getenv("GOFLAGS")+" -race"))
	}
	command := func(name string, args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Dir = "../../.." // the root module
		cmd.Env = environ
		// So that the driver can clean up when the test's time is over.
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = 30 * time.Second
		return cmd
	}

	binary := filepath.Join(t.TempDir(), "demo")
	if out, err := command("go", "build", "-o", binary, "./internal/demo").CombinedOutput(); err != nil {
		t.Fatalf("building the driver: %v\n%s", err, out)
	}
	cmd := command(binary, append([]string{"-payments", strconv.Itoa(payments), "-copies", strconv.Itoa(copies)}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	t.Logf("demo %s\n%s%s", strings.Join(args, " "), &stdout, &stderr)
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if strings.Contains(stderr.String(), "DATA RACE") { // of a consumer that was killed, which hides its status
		t.Error("there is a data race")
	}
	return stdout.String(), cmd.ProcessState.ExitCode()
}

// table is the driver's, by the names of its lines.
type table map[string]struct{ expected, counted string }

// parseTable reads lines of a name, what is expected (if anything) and what was counted. The columns have
// fixed places.
func parseTable(t *testing.T, output string) table {
	t.Helper()
	const nameEnd, expectedEnd, countedEnd = 22, 37, 52
	parsed := make(table)
	_, rest, found := strings.Cut(output, "expected        counted\n")
	if !found {
		t.Fatal("there is no table in the output")
	}
	for line := range strings.Lines(rest) {
		if strings.TrimSpace(line) == "" {
			break
		}
		if line = strings.TrimRight(line, "\n"); len(line) < countedEnd {
			t.Fatalf("a line of the table is too short: %q", line)
		}
		row := parsed[strings.TrimSpace(line[:nameEnd])]
		row.expected = strings.TrimSpace(line[nameEnd:expectedEnd])
		row.counted = strings.TrimSpace(line[expectedEnd:countedEnd])
		parsed[strings.TrimSpace(line[:nameEnd])] = row
	}
	return parsed
}

func (p table) number(t *testing.T, name string) int {
	t.Helper()
	n, err := strconv.Atoi(p[name].counted)
	if err != nil {
		t.Errorf("%s: %v", name, err)
	}
	return n
}
