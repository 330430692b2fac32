//go:build unix

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

// report is what happened in a run, and what came of it.
type report struct {
	inbox    string
	database string
	seed     uint64
	took     time.Duration

	deaths recoveries // of workers, by the point at which they killed themselves
	faults recoveries // from outside, by kind

	payments, sent, again, returned, repaired int
	handlerRuns, processed, duplicates        int
	replayed, rolledBack                      int
	events, eventCopies                       int
	bookings, claims                          int
	relayed, unsent                           int

	violations []string
}

// recoveries are how long it took after each fault until a message was processed again.
type recoveries struct {
	mutex sync.Mutex
	kinds map[string]*recovery
}

type recovery struct {
	injected int
	waits    []<-chan time.Duration
	took     []time.Duration
}

// add counts a fault; the channel gets one value, or none if nothing was processed any more.
func (r *recoveries) add(kind string, took <-chan time.Duration) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.kinds == nil {
		r.kinds = map[string]*recovery{}
	}
	if r.kinds[kind] == nil {
		r.kinds[kind] = &recovery{}
	}
	r.kinds[kind].injected++
	r.kinds[kind].waits = append(r.kinds[kind].waits, took)
}

// collect takes what the channels have.
func (r *recovery) collect() {
	for _, wait := range r.waits {
		select {
		case took := <-wait:
			r.took = append(r.took, took)
		default:
		}
	}
	r.waits = nil
	slices.Sort(r.took)
}

func (r *recoveries) total() (n int) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, kind := range r.kinds {
		n += kind.injected
	}
	return n
}

func (r *recoveries) print(out io.Writer, prefix string, order []string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, name := range order {
		kind := r.kinds[name]
		if kind == nil {
			fmt.Fprintf(out, "  %s%s\t0\t\t\n", prefix, name)
			continue
		}
		kind.collect()
		if len(kind.took) == 0 {
			fmt.Fprintf(out, "  %s%s\t%d\t\t\n", prefix, name, kind.injected)
			continue
		}
		fmt.Fprintf(out, "  %s%s\t%d\t%.2f s\t%.2f s\n", prefix, name, kind.injected,
			kind.took[len(kind.took)/2].Seconds(), kind.took[len(kind.took)-1].Seconds())
	}
}

func (r *report) print(out io.Writer) {
	fmt.Fprintf(out, "\n%s on %s, seed %d, %s\n", r.inbox, r.database, r.seed, r.took.Round(time.Second))
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "  fault\tinjected\trecovered within\tat most")
	r.deaths.print(table, "worker killed: ", points)
	var names []string
	for _, f := range faults {
		if !f.postgresql || r.database == postgresqlName {
			names = append(names, f.name)
		}
	}
	r.faults.print(table, "", names)
	_ = table.Flush()
	fmt.Fprintf(out, "  %d faults; %d payments; %d messages confirmed, %d sent again without a confirm, %d returned, %d sent again after a queue was deleted\n",
		r.deaths.total()+r.faults.total(), r.payments, r.sent, r.again, r.returned, r.repaired)
	fmt.Fprintf(out, "  %d handler runs, %d processed as far as they could say, %d failed or rolled back, %d duplicates, %d replays\n",
		r.handlerRuns, r.processed, r.rolledBack, r.duplicates, r.replayed)
	fmt.Fprintf(out, "  %d bookings, %d claims, %d events, %d copies of events published, %d publishes by relays, %d records unsent\n",
		r.bookings, r.claims, r.events, r.eventCopies, r.relayed, r.unsent)
	fmt.Fprintf(out, "  verdict: %s\n", r.verdict())
}

func (r *report) verdict() string {
	if len(r.violations) == 0 {
		return "every payment once, every event once"
	}
	return "BROKEN\n    " + strings.Join(r.violations, "\n    ")
}

// fill takes the counts from all who have counted.
func (r *report) fill(run *run, state *finalState) {
	p := run.publisher
	p.mutex.Lock()
	defer p.mutex.Unlock()
	r.payments, r.sent, r.again, r.returned, r.repaired = len(p.payments), p.sent, p.again, p.returned, p.repaired
	tally := run.crew.tally
	for _, consumer := range []string{bookings, audits, invoices} {
		r.handlerRuns += tally.count("run " + consumer)
		r.claims += len(state.claims[consumer])
	}
	r.relayed, r.unsent = state.relayed, len(state.unsent)
	r.processed, r.duplicates = tally.count(processed), tally.count("inbox duplicate")
	r.replayed, r.rolledBack = tally.count("inbox replayed"), tally.count("inbox failed")
	for _, rows := range state.ledger {
		r.bookings += len(rows)
	}
	for _, uuids := range state.tapped {
		r.events += len(uuids)
		for _, copies := range uuids {
			r.eventCopies += copies
		}
	}
}
