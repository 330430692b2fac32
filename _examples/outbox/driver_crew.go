//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// stopLimit is how long a process may take to end after SIGTERM.
const stopLimit = 15 * time.Second

// roles are the processes, and the log line with which each tells that it works on a message.
var roles = []struct {
	name      string
	processes int
	works     string
}{
	{"orders", 2, "Booking order"},
	{"forwarder", 1, "Message acked by subscriber"}, // published, and not yet committed
	{"invoices", 2, "Writing invoice"},
}

// crew is all processes.
type crew struct {
	stage   *stage
	tally   *tally
	members map[string][]*member
	fail    context.CancelCauseFunc // called when one ends by itself
}

func newCrew(s *stage, verbose bool) *crew {
	c := &crew{stage: s, tally: &tally{verbose: verbose, counts: make(map[string]map[string]int)}, members: make(map[string][]*member)}
	for _, role := range roles {
		c.members[role.name] = make([]*member, role.processes)
	}
	return c
}

func (c *crew) names() string {
	var names []string
	for _, role := range roles {
		names = append(names, fmt.Sprintf("%d x %s", role.processes, role.name))
	}
	return strings.Join(names, ", ")
}

func (c *crew) startRole(ctx context.Context, role string) error {
	for i := range c.members[role] {
		if err := c.start(ctx, role, i+1); err != nil {
			return err
		}
	}
	return nil
}

// start starts a process of this program, for the first time or again, and waits until its router runs.
func (c *crew) start(ctx context.Context, role string, number int) error {
	executable, err := os.Executable()
	if err != nil {
		return err
	}
	m := &member{role: role, number: number, up: make(chan struct{}), working: make(chan struct{}, 1), ended: make(chan struct{})}
	m.cmd = exec.Command(executable, "-role", role)
	m.cmd.Env = append(os.Environ(), c.stage.environ(role)...)
	m.cmd.Stderr = os.Stderr
	if _, err := m.cmd.StdinPipe(); err != nil { // it ends with us, see END_WITH_STDIN
		return err
	}
	stdout, err := m.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := m.cmd.Start(); err != nil {
		return err
	}
	c.members[role][number-1] = m
	go func() {
		defer close(m.ended)
		c.read(m, stdout)
		_ = m.cmd.Wait()
		if !m.expected.Load() {
			c.fail(fmt.Errorf("%s ended by itself: %s", m, m.cmd.ProcessState))
		}
	}()
	select {
	case <-m.up:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// read counts the lines of a process. What it has written before it was killed is still there to be read.
func (c *crew) read(m *member, stdout io.Reader) {
	up := sync.OnceFunc(func() { close(m.up) })
	for lines := bufio.NewReader(stdout); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return // the rest, if any, is half a line
		}
		switch c.tally.add(m, line) {
		case "Running":
			up()
		case m.works():
			select {
			case m.working <- struct{}{}:
			default:
			}
		}
	}
}

func (c *crew) pick(role string, random *rand.Rand) *member {
	return c.members[role][random.IntN(len(c.members[role]))]
}

// stopRole stops the processes of a role, at once.
func (c *crew) stopRole(role string) error {
	errs := make(chan error)
	for _, m := range c.members[role] {
		go func() { errs <- m.stop() }()
	}
	var all error
	for range c.members[role] {
		all = errors.Join(all, <-errs)
	}
	return all
}

// killAll leaves no process behind.
func (c *crew) killAll() {
	for _, members := range c.members {
		for _, m := range members {
			if m != nil {
				m.kill()
			}
		}
	}
}

// member is one process.
type member struct {
	role     string
	number   int
	cmd      *exec.Cmd
	up       chan struct{} // closed when its router runs
	working  chan struct{} // has an element when it has begun a message
	expected atomic.Bool   // its end is
	ended    chan struct{} // closed then, when all its lines are counted
}

func (m *member) String() string { return fmt.Sprintf("%s %d", m.role, m.number) }

func (m *member) works() string {
	for _, role := range roles {
		if role.name == m.role {
			return role.works
		}
	}
	return ""
}

// waitForWork waits until the process begins a message, for a while.
func (m *member) waitForWork(ctx context.Context) bool {
	select {
	case <-m.working: // an old one, perhaps
	default:
	}
	select {
	case <-m.working:
		return true
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
	return false
}

func (m *member) kill() {
	m.expected.Store(true)
	_ = m.cmd.Process.Kill() // fails if it has ended
	<-m.ended
}

// stop asks the process to end, as a deployment does.
func (m *member) stop() error {
	m.expected.Store(true)
	if err := m.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("%s: %w", m, err)
	}
	select {
	case <-m.ended:
	case <-time.After(stopLimit):
		m.kill()
		return fmt.Errorf("%s has not ended within %s after SIGTERM", m, stopLimit)
	}
	if !m.cmd.ProcessState.Success() {
		return fmt.Errorf("%s ended after SIGTERM with %s, not with status 0", m, m.cmd.ProcessState)
	}
	return nil
}

// tally counts the log lines of all processes.
type tally struct {
	verbose bool

	mutex  sync.Mutex
	counts map[string]map[string]int // by role and message
	errors []string                  // the latest
}

// add counts a line and returns its message.
func (t *tally) add(m *member, line []byte) string {
	var fields struct{ Level, Msg string }
	_ = json.Unmarshal(line, &fields)

	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.counts[m.role] == nil {
		t.counts[m.role] = make(map[string]int)
	}
	t.counts[m.role][fields.Msg]++
	text := fmt.Sprintf("%s: %s", m, strings.TrimSpace(string(line)))
	if fields.Level == "ERROR" {
		t.errors = append(t.errors[max(0, len(t.errors)-9):], text)
	}
	if t.verbose {
		fmt.Fprintln(os.Stderr, text)
	}
	return fields.Msg
}

func (t *tally) count(role, message string) int {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return t.counts[role][message]
}

// lines is the number of all lines of a role.
func (t *tally) lines(role string) int {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	lines := 0
	for _, count := range t.counts[role] {
		lines += count
	}
	return lines
}

// printErrors prints the latest errors that the processes have logged.
func (t *tally) printErrors(w io.Writer) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, line := range t.errors {
		fmt.Fprintln(w, line)
	}
}
