//go:build unix

package servers

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// startShell runs a shell script as a process, in the folder of its log.
func startShell(t *testing.T, script string) (*process, *folder) {
	t.Helper()
	f := &folder{path: t.TempDir()}
	log, err := openLog(f)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Dir = f.path
	p, err := startProcess(cmd, log, syscall.SIGKILL)
	if err != nil {
		t.Fatal(err)
	}
	return p, f
}

// untilLogged is a probe that waits for the script's first line.
func untilLogged(f *folder) func(context.Context) error {
	return func(context.Context) error {
		if f.logTail() == nil {
			return errors.New("nothing yet")
		}
		return nil
	}
}

func TestProcessEndsAtSignal(t *testing.T) {
	p, f := startShell(t, `trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done`)
	if err := p.await(context.Background(), time.Minute, untilLogged(f)); err != nil {
		t.Fatal(err)
	}
	if err := p.end(syscall.SIGTERM, time.Minute); err != nil {
		t.Error(err)
	}
	if text := f.logTail().Error(); !strings.HasSuffix(text, "up\nbye") || p.running() {
		t.Errorf("running %v, log %q", p.running(), text)
	}
	if err := p.end(syscall.SIGTERM, time.Minute); err != nil {
		t.Errorf("end() of what has ended: %v", err)
	}
}

func TestProcessIsKilledAfterGrace(t *testing.T) {
	p, f := startShell(t, `trap '' TERM; echo up; while :; do sleep 0.01; done`)
	if err := p.await(context.Background(), time.Minute, untilLogged(f)); err != nil {
		t.Fatal(err)
	}
	if err := p.end(syscall.SIGTERM, 50*time.Millisecond); err == nil || p.running() {
		t.Errorf("end() = %v, running %v", err, p.running())
	}
}

func TestProcessIsDoneWhenItsHelpersAre(t *testing.T) {
	p, f := startShell(t, `(until [ -e go ]; do sleep 0.01; done; echo helper) & echo up`)
	if err := p.await(context.Background(), time.Minute, untilLogged(f)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.join("go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	<-p.done
	if text := f.logTail().Error(); !strings.HasSuffix(text, "up\nhelper") {
		t.Errorf("done before the helper, log %q", text)
	}
}

func TestAwait(t *testing.T) {
	never := func(context.Context) error { return errors.New("not yet") }

	ended, _ := startShell(t, `exit 3`)
	if err := ended.await(context.Background(), time.Minute, never); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("a program that ended: %v", err)
	}

	p, _ := startShell(t, `while :; do sleep 0.01; done`)
	defer p.end(syscall.SIGKILL, time.Minute)
	if err := p.await(context.Background(), time.Millisecond, never); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "not yet") {
		t.Errorf("a program that is slow: %v", err)
	}
	reason := errors.New("the caller's reason")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(reason)
	if err := p.await(ctx, time.Minute, never); !errors.Is(err, reason) {
		t.Errorf("a caller that gave up: %v", err)
	}
}

func TestStartProcessError(t *testing.T) {
	log, err := os.Create(t.TempDir() + "/log")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := startProcess(exec.Command("/nowhere/program"), log, syscall.SIGKILL); err == nil {
		t.Error("no error for a program that is not there")
	}
}
