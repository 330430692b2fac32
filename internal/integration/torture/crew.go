//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// stopLimit is how long a worker may take to end after SIGTERM.
const stopLimit = 30 * time.Second

// maxPassages is at which passage of its point a worker dies at the latest.
const maxPassages = 100

// crew is the worker processes. It starts again what dies.
type crew struct {
	config  func(number int) workerConfig // without its death
	verbose bool
	tally   *tally
	report  *report

	mutex    sync.Mutex
	random   *rand.Rand // draws deaths
	points   []string   // not drawn yet
	calm     bool       // no more deaths, and
	stopping bool       // no new workers
	members  []*member
	running  sync.WaitGroup
	failures []string
	poisoned []string // why, of each message
}

// member is one worker, in its successive processes.
type member struct {
	number  int
	process *os.Process
	ended   chan struct{} // of this process
	stopped bool          // by SIGSTOP
}

func newCrew(n int, random *rand.Rand, config func(int) workerConfig, report *report, verbose bool) *crew {
	c := &crew{config: config, verbose: verbose, tally: newTally(), report: report, random: random}
	for number := range n {
		c.members = append(c.members, &member{number: number + 1})
	}
	return c
}

func (c *crew) start() error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for _, m := range c.members {
		if err := c.startProcess(m); err != nil {
			return err
		}
	}
	return nil
}

// startProcess is called with the lock.
func (c *crew) startProcess(m *member) error {
	config := c.config(m.number)
	if !c.calm {
		config.Death = c.drawDeath()
	}
	encoded, err := json.Marshal(config)
	if err != nil {
		return err
	}
	executable, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(executable)
	cmd.Env = append(os.Environ(), workerVariable+"="+string(encoded))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the driver
	stderr := &lastLines{verbose: c.verbose}
	cmd.Stderr = stderr
	if _, err := cmd.StdinPipe(); err != nil { // its end tells the worker that we are gone
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	m.process, m.ended, m.stopped = cmd.Process, make(chan struct{}), false
	c.running.Add(1)
	go c.watch(m, m.ended, cmd, stdout, stderr)
	return nil
}

// drawDeath takes the points in a random order, each as often as the others.
func (c *crew) drawDeath() death {
	if len(c.points) == 0 {
		c.points = slices.Clone(points)
		c.random.Shuffle(len(c.points), func(a, b int) { c.points[a], c.points[b] = c.points[b], c.points[a] })
	}
	d := death{Point: c.points[0], Count: 1 + c.random.Int64N(maxPassages)}
	if slices.Contains(rarePoints, d.Point) {
		d.Count = 1 + d.Count%2
	}
	c.points = c.points[1:]
	return d
}

// watch reads what a process says until it ends, and starts the next one.
func (c *crew) watch(m *member, ended chan struct{}, cmd *exec.Cmd, stdout io.Reader, stderr *lastLines) {
	defer c.running.Done()
	var dying string
	for lines := bufio.NewReader(stdout); ; {
		line, err := lines.ReadString('\n')
		if err != nil {
			break // the rest, if any, is half a line
		}
		line = strings.TrimSuffix(line, "\n")
		if point, ok := strings.CutPrefix(line, "dying "); ok {
			dying = point
		}
		if reason, ok := strings.CutPrefix(line, "poisoned "); ok {
			c.mutex.Lock()
			c.poisoned = append(c.poisoned, reason)
			c.mutex.Unlock()
		}
		c.tally.add(line)
	}
	err := cmd.Wait()
	close(ended)

	c.mutex.Lock()
	defer c.mutex.Unlock()
	var killed, terminated bool
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		killed = status.Signal() == syscall.SIGKILL
		terminated = status.Signal() == syscall.SIGTERM // before it listened to that
	}
	switch {
	case dying != "" && killed:
		c.report.deaths.add(dying, c.tally.untilProgress(time.Now()))
	case killed, terminated: // by us
	case err != nil && !errors.Is(err, os.ErrProcessDone):
		// A worker ends by itself when it finds no broker at its start; a deployment starts it again.
		if !strings.Contains(stderr.String(), "stopped: ") {
			c.failures = append(c.failures, fmt.Sprintf("worker %d crashed: %s: %s", m.number, cmd.ProcessState, stderr))
		}
		if !c.stopping {
			c.mutex.Unlock()
			time.Sleep(300 * time.Millisecond)
			c.mutex.Lock()
		}
	}
	if c.stopping {
		return
	}
	if err := c.startProcess(m); err != nil {
		c.failures = append(c.failures, fmt.Sprintf("cannot start worker %d: %v", m.number, err))
	}
}

// signal sends a signal to a worker that is drawn.
func (c *crew) signal(random *rand.Rand, signals ...syscall.Signal) *member {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	m := c.members[random.IntN(len(c.members))]
	for _, signal := range signals {
		_ = m.process.Signal(signal)
	}
	return m
}

func (c *crew) resume(m *member) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	_ = m.process.Signal(syscall.SIGCONT)
}

// calmDown replaces the workers that would still die by others that do not.
func (c *crew) calmDown() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.calm = true
	for _, m := range c.members {
		_ = m.process.Kill()
	}
}

// stop stops all workers as a deployment does, and returns what was wrong with them.
func (c *crew) stop() []string {
	c.mutex.Lock()
	c.stopping = true
	for _, m := range c.members {
		if m.process != nil {
			_ = m.process.Signal(syscall.SIGTERM)
		}
	}
	c.mutex.Unlock()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.running.Wait()
	}()
	select {
	case <-ended:
	case <-time.After(stopLimit):
		c.mutex.Lock()
		for _, m := range c.members {
			select {
			case <-m.ended:
			default:
				c.failures = append(c.failures, fmt.Sprintf("worker %d had not ended %s after SIGTERM", m.number, stopLimit))
			}
			_ = m.process.Kill()
		}
		c.mutex.Unlock()
		<-ended
	}
	return c.failures
}
