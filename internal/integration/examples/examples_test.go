//go:build unix

// Package examples runs the examples that need servers, with small numbers.
package examples

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestOutbox(t *testing.T) {
	t.Parallel()
	// The servers are not ours to kill here; the processes are.
	output := run(t, "outbox", "-orders", "40", "-kills", "3", "-seed", "1")
	if !strings.Contains(output, "OK: each of 40 orders was booked once and invoiced once") {
		t.Errorf("no verdict")
	}
}

func TestCQRS(t *testing.T) {
	t.Parallel()
	output := run(t, "cqrs")
	if !strings.Contains(output, "OK: everything happened once for each of 10 orders") {
		t.Errorf("no verdict")
	}
}

// run builds the example and runs it on the test servers; the test fails unless it ends with status 0.
func run(t *testing.T, name string, arguments ...string) string {
	t.Helper()
	for _, variable := range []string{"WATERMILL_TEST_POSTGRES_URL", "WATERMILL_TEST_AMQP_URI"} {
		if os.Getenv(variable) == "" {
			t.Fatalf("%s is not set; run the tests by make test, which starts servers", variable)
		}
	}
	program := filepath.Join(t.TempDir(), name)
	build := exec.Command("go", "build", "-o", program, "./"+name)
	build.Dir = filepath.Join("..", "..", "..", "_examples")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, arguments...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it cleans up
	cmd.WaitDelay = 20 * time.Second
	output, err := cmd.CombinedOutput()
	t.Logf("%s", output)
	if err != nil {
		t.Errorf("%s: %v", name, err)
	}
	return string(output)
}
