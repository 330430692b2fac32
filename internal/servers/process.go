//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// process is a program in the background, in a process group of its own so that
// a Ctrl-C at the terminal reaches us and not the program.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the program and its helpers are gone
}

// startProcess starts a program whose output goes to log, which it closes.
// parentDeath is what the program is sent when we are killed, on systems that
// can do that.
func startProcess(cmd *exec.Cmd, log io.WriteCloser, parentDeath syscall.Signal) (*process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	setParentDeath(cmd.SysProcAttr, parentDeath)

	// Not a file but a pipe: every helper inherits it, and Wait returns when
	// the last holder has closed it. That is how we know that all are gone.
	output := struct{ io.Writer }{log}
	cmd.Stdout, cmd.Stderr = output, output
	cmd.WaitDelay = 20 * time.Second

	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The system takes the end of the starting thread for the end of the
		// parent, so this thread is kept until the program has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer log.Close()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended is in ProcessState
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// running reports whether the program has not ended yet.
func (p *process) running() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// end sends the signal and waits until the program is gone. After grace it
// kills it, and says so.
func (p *process) end(signal syscall.Signal, grace time.Duration) error {
	if !p.running() {
		return nil
	}
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("servers: %s: %w", p.cmd.Path, err)
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(grace):
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
	return fmt.Errorf("servers: %s was killed because it did not end within %s of signal %q", p.cmd.Path, grace, signal)
}

// await probes until the program is ready, has ended, takes too long or the
// context ends.
func (p *process) await(ctx context.Context, limit time.Duration, probe func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	go func() { // a probe does not wait for a program that has ended
		select {
		case <-p.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	ticker := time.NewTicker(25 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := probe(ctx)
		switch {
		case err == nil:
			return nil
		case !p.running():
			return fmt.Errorf("it ended while it was starting: %s", p.cmd.ProcessState)
		case ctx.Err() != nil:
			return fmt.Errorf("%w (last answer: %w)", context.Cause(ctx), err)
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

// run runs a program to its end. The error has what the program said, unless the
// context's end is all there is to say.
func run(ctx context.Context, cmd *exec.Cmd) error {
	output, err := cmd.CombinedOutput()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	default:
		return fmt.Errorf("%s: %w\n%s", cmd.Path, err, output)
	}
}
