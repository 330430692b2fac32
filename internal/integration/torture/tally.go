//go:build unix

package main

import (
	"context"
	"os"
	"sync"
	"time"
)

// tally counts what the workers say.
type tally struct {
	mutex    sync.Mutex
	counts   map[string]int
	last     time.Time
	progress chan struct{} // closed at the next message that is processed
}

func newTally() *tally {
	return &tally{counts: map[string]int{}, progress: make(chan struct{})}
}

const processed = "inbox processed"

func (t *tally) add(line string) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.counts[line]++
	t.last = time.Now()
	if line == processed {
		close(t.progress)
		t.progress = make(chan struct{})
	}
}

func (t *tally) count(line string) int {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return t.counts[line]
}

// silence is how long nobody has said anything.
func (t *tally) silence() time.Duration {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return time.Since(t.last)
}

// untilProgress sends how long it has taken since then, when the next message is processed.
func (t *tally) untilProgress(since time.Time) <-chan time.Duration {
	t.mutex.Lock()
	progress := t.progress
	t.mutex.Unlock()
	took := make(chan time.Duration, 1)
	go func() {
		<-progress
		took <- time.Since(since)
	}()
	return took
}

// wait returns how long it took until the next message was processed; false when the context ended before.
func (t *tally) wait(ctx context.Context, since time.Time) (time.Duration, bool) {
	select {
	case took := <-t.untilProgress(since):
		return took, true
	case <-ctx.Done():
		return 0, false
	}
}

// lastLines keeps the end of what a process writes to stderr.
type lastLines struct {
	verbose bool
	mutex   sync.Mutex
	text    []byte
}

func (l *lastLines) Write(text []byte) (int, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.verbose {
		_, _ = os.Stderr.Write(text)
	}
	l.text = append(l.text, text...)
	l.text = l.text[max(0, len(l.text)-4000):]
	return len(text), nil
}

func (l *lastLines) String() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return string(l.text)
}
