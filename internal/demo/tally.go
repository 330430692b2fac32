//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
)

// counts is what the consumers' logs say so far.
type counts struct {
	lines      int
	deliveries int // that reached a router
	runs       int // of the handler
	booking    int // number of the consumer that began the latest of them
	duplicates int // acknowledged without a run
}

// tally counts the log lines of all consumers.
type tally struct {
	verbose bool

	lock    sync.Mutex
	now     counts
	changed chan struct{} // closed at the next line
	errors  []string      // the latest
}

func newTally(verbose bool) *tally {
	return &tally{verbose: verbose, changed: make(chan struct{})}
}

// add counts one line, which may be anything.
func (t *tally) add(number int, line json.RawMessage) {
	var fields struct{ Level, Msg string }
	_ = json.Unmarshal(line, &fields)

	t.lock.Lock()
	defer t.lock.Unlock()
	t.now.lines++
	switch fields.Msg {
	case "Received message": // Watermill's router
		t.now.deliveries++
	case "Booking payment": // amqp_example, before it writes
		t.now.runs++
		t.now.booking = number
	case "Message duplicate": // the inbox, before the acknowledgement
		t.now.duplicates++
	}
	text := fmt.Sprintf("consumer %d: %s", number, line)
	if fields.Level == "ERROR" {
		t.errors = append(t.errors[max(0, len(t.errors)-9):], text)
	}
	if t.verbose {
		fmt.Fprintln(os.Stderr, text)
	}
	close(t.changed)
	t.changed = make(chan struct{})
}

func (t *tally) counts() counts {
	t.lock.Lock()
	defer t.lock.Unlock()
	return t.now
}

// wait waits for that many runs of the handler and returns the counts.
func (t *tally) wait(ctx context.Context, runs int) (counts, error) {
	for {
		t.lock.Lock()
		now, changed := t.now, t.changed
		t.lock.Unlock()
		if now.runs >= runs {
			return now, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return now, context.Cause(ctx)
		}
	}
}

// printErrors prints the latest errors that the consumers have logged.
func (t *tally) printErrors(w io.Writer) {
	t.lock.Lock()
	defer t.lock.Unlock()
	for _, line := range t.errors {
		fmt.Fprintln(w, line)
	}
}
