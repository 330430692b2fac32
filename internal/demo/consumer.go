//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// build compiles the program that consumes, so that signals reach it and not the go command.
func build(ctx context.Context) (binary string, remove func(), err error) {
	folder, err := os.MkdirTemp("", "inbox-demo-")
	if err != nil {
		return "", nil, err
	}
	remove = func() { _ = os.RemoveAll(folder) }
	binary = filepath.Join(folder, "amqp_example")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", binary, "github.com/devmappa/watermill-inbox/amqp_example")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		remove()
		return "", nil, fmt.Errorf("building amqp_example: %w", err)
	}
	return binary, remove, nil
}

// crew is the consumer processes.
type crew struct {
	binary  string
	args    []string
	environ []string
	members [consumers]*member // consumer 1 is the first
	tally   *tally
	fail    context.CancelCauseFunc // called when one ends by itself
}

func newCrew(binary string, s *stage, o options) *crew {
	c := &crew{binary: binary, tally: newTally(o.verbose)}
	if o.naive {
		c.args = append(c.args, "-naive")
	}
	// Level 2 has a line per delivery.
	c.environ = append(s.environ(), "DEBUG=2", "CONCURRENCY="+strconv.Itoa(o.concurrent))
	return c
}

// start starts the consumer with that number, for the first time or again, and waits until it is up: then
// it has connected to the servers and takes signals.
func (c *crew) start(ctx context.Context, number int) error {
	m := &member{number: number, up: make(chan struct{}), ended: make(chan struct{})}
	m.cmd = exec.Command(c.binary, c.args...)
	m.cmd.Env = append(os.Environ(), c.environ...)
	m.cmd.Stderr = os.Stderr
	m.cmd.SysProcAttr = endWithUs()
	stdout, err := m.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := m.cmd.Start(); err != nil {
		return err
	}
	c.members[number-1] = m
	go func() {
		defer close(m.ended)
		// What a process has written before it was killed is still there to be read. Its last line may
		// be cut, and ends the reading like the end of the file.
		up := sync.OnceFunc(func() { close(m.up) })
		decoder := json.NewDecoder(stdout)
		for {
			var line json.RawMessage
			if err := decoder.Decode(&line); err != nil {
				break
			}
			c.tally.add(number, line)
			up()
		}
		_, _ = io.Copy(io.Discard, stdout)
		_ = m.cmd.Wait()
		if !m.expected.Load() {
			c.fail(fmt.Errorf("consumer %d ended by itself: %s", number, m.cmd.ProcessState))
		}
	}()
	select {
	case <-m.up:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *crew) member(number int) *member { return c.members[number-1] }

// stop stops all that are running, at once.
func (c *crew) stop() error {
	errs := make(chan error)
	for _, m := range c.members {
		go func() {
			_, err := m.stop()
			errs <- err
		}()
	}
	var all error
	for range c.members {
		all = errors.Join(all, <-errs)
	}
	return all
}

// kill leaves no process behind.
func (c *crew) kill() {
	for _, m := range c.members {
		if m != nil {
			m.kill()
		}
	}
}

// member is one process.
type member struct {
	number   int
	cmd      *exec.Cmd
	up       chan struct{} // closed at its first log line
	expected atomic.Bool   // its end is
	ended    chan struct{} // closed then, when all its lines are counted
}

func (m *member) kill() {
	m.expected.Store(true)
	_ = m.cmd.Process.Kill() // fails if it has ended
	<-m.ended
}

// stop asks the process to end, as a deployment does, and returns how long it took.
func (m *member) stop() (time.Duration, error) {
	select {
	case <-m.ended:
		return 0, nil
	default:
	}
	m.expected.Store(true)
	began := time.Now()
	if err := m.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return 0, fmt.Errorf("consumer %d: %w", m.number, err)
	}
	limit := time.NewTimer(stopLimit)
	defer limit.Stop()
	select {
	case <-m.ended:
	case <-limit.C:
		m.kill()
		return stopLimit, fmt.Errorf("consumer %d has not ended within %s after SIGTERM", m.number, stopLimit)
	}
	if !m.cmd.ProcessState.Success() {
		return 0, fmt.Errorf("consumer %d ended after SIGTERM with %s, not with status 0", m.number, m.cmd.ProcessState)
	}
	return time.Since(began), nil
}
