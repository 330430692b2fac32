//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

const (
	postgresqlName = "postgresql"
	sqliteName     = "sqlite"

	workers = 4
	rate    = 80  // payments per second, as long as there are fewer messages
	backlog = 500 // waiting

	// recoveryLimit is how long it may take until a message is processed after a fault.
	recoveryLimit = time.Minute

	// restLimit is how long it may take until all has come to rest at the end. A wrong inbox may never.
	restLimit      = 3 * time.Minute
	wrongRestLimit = 30 * time.Second

	// unsentLimit is how long stored messages may be unsent when all else is at rest: the relay's age, the lease of one
	// that died, a pass, and a slow machine.
	unsentLimit = 30 * time.Second

	// restSilence is how long nobody must have said anything: longer than the workers' back-off.
	restSilence = 3 * time.Second
)

// run is one inbox under torture.
type run struct {
	arena     *arena
	publisher *publisher
	crew      *crew
	report    *report
	progress  io.Writer
	tapped    map[string]map[string]int
}

// torture runs an inbox for so long on servers of its own, and returns the report.
func torture(ctx context.Context, inboxName, database string, duration time.Duration, seed uint64, verbose bool, progress io.Writer) (_ *report, err error) {
	a, err := newArena(ctx, database)
	if err != nil {
		return nil, err
	}
	defer func() {
		if closeErr := a.close(); err == nil {
			err = closeErr
		}
	}()
	// A stream for each, so that what one draws does not depend on how fast the others are.
	random := func(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, stream)) }
	r := &run{
		arena:     a,
		publisher: newPublisherOf(a, random(1)),
		report:    &report{inbox: inboxName, database: database, seed: seed},
		progress:  progress,
		tapped:    map[string]map[string]int{},
	}
	r.crew = newCrew(workers, random(2), func(number int) workerConfig { return a.worker(number, inboxName) }, r.report, verbose)
	begin := time.Now()
	if err := r.play(ctx, duration, random(3)); err != nil {
		return nil, err
	}
	r.report.took = time.Since(begin)
	return r.report, ctx.Err()
}

// play is the run in its order: load and faults, rest, the end of the workers, the check.
func (r *run) play(ctx context.Context, duration time.Duration, random *rand.Rand) error {
	if err := r.crew.start(); err != nil {
		return err
	}
	stopped := false
	defer func() {
		if !stopped {
			r.crew.stop()
		}
	}()
	publishing, stopPublishing := context.WithCancel(ctx)
	var background sync.WaitGroup
	defer background.Wait()
	defer stopPublishing()
	background.Go(func() { r.publisher.run(publishing) })

	// Payments come until the last fault is over and recovered from: without them there is nothing to process.
	loading, stopLoading := context.WithCancel(ctx)
	defer stopLoading()
	background.Go(func() { r.load(loading) })
	faulting, stopFaulting := context.WithTimeout(ctx, duration)
	defer stopFaulting()
	if _, ok := r.crew.tally.wait(faulting, time.Now()); !ok {
		return fmt.Errorf("no worker has processed anything within %s", duration)
	}
	r.injectFaults(faulting, ctx, random)
	stopLoading()
	if err := ctx.Err(); err != nil {
		return err
	}

	r.crew.calmDown()
	if err := r.comeToRest(ctx); err != nil {
		return err
	}
	stopped = true
	r.report.violations = append(r.report.violations, r.crew.stop()...)
	return r.judge(ctx)
}

// load makes payments until the context ends, unless the workers are behind.
func (r *run) load(ctx context.Context) {
	const tick = 250 * time.Millisecond
	for pause(ctx, tick) == nil {
		if waiting, err := r.arena.waiting(); err == nil && waiting < backlog {
			r.publisher.create(int(rate * tick / time.Second))
		}
	}
}

// injectFaults until the first context ends; a fault that has begun is finished.
func (r *run) injectFaults(faulting, ctx context.Context, random *rand.Rand) {
	for first := true; pause(faulting, time.Duration(200+random.IntN(1500))*time.Millisecond) == nil; first = false {
		f := draw(random, r.arena.postgresql != nil)
		// It must be in every run, and alone convicts noBackOff. Other faults could clear that one: what is sent again
		// after a queue was deleted is replayed.
		if first && r.report.inbox == ours || r.report.inbox == noBackOff {
			f = outputAway
		}
		fmt.Fprintf(r.progress, "%s  %s\n", time.Now().Format(time.TimeOnly), f.name)
		if err := f.inject(ctx, r, random); err != nil {
			if ctx.Err() == nil {
				r.violated("fault %q: %v", f.name, err)
			}
			return
		}
		over := time.Now()
		limited, cancel := context.WithTimeout(ctx, recoveryLimit)
		took, ok := r.crew.tally.wait(limited, over)
		cancel()
		if ctx.Err() != nil {
			return
		}
		recovered := make(chan time.Duration, 1)
		r.report.faults.add(f.name, recovered)
		if !ok {
			waiting, err := r.arena.waiting()
			r.violated("nothing was processed within %s after %q, %d messages wait (%v)", recoveryLimit, f.name, waiting, err)
			return
		}
		recovered <- took
	}
}

func (r *run) violated(format string, args ...any) {
	r.report.violations = append(r.report.violations, fmt.Sprintf(format, args...))
}

// comeToRest waits until all is sent and handled, and sends again what was lost with a deleted queue.
func (r *run) comeToRest(ctx context.Context) error {
	limit := restLimit
	if r.report.inbox != ours {
		limit = wrongRestLimit
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		for {
			waiting, err := r.arena.waiting()
			if err == nil && waiting == 0 && r.publisher.pending() == 0 && r.crew.tally.silence() > restSilence {
				break
			}
			if pause(limited, 200*time.Millisecond) != nil {
				if ctx.Err() == nil {
					r.violated("not at rest within %s: %d messages waiting, %d to be sent", limit, waiting, r.publisher.pending())
				}
				return ctx.Err()
			}
		}
		if r.report.inbox == ours {
			if relayed, err := r.untilSent(limited); relayed && err == nil {
				continue // events are on their way
			} else if err != nil {
				return ctx.Err()
			}
		}
		repaired, err := r.repair(ctx)
		if err != nil || repaired == 0 {
			return err
		}
	}
}

// untilSent waits until no stored message is unsent, and reports whether it had to wait.
func (r *run) untilSent(ctx context.Context) (waited bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, unsentLimit)
	defer cancel()
	for {
		var unsent int
		err := r.arena.db.QueryRowContext(ctx, `SELECT count(*) FROM watermill_inbox_unsent`).Scan(&unsent)
		if err == nil && unsent == 0 {
			return waited, nil
		}
		waited = true
		if pause(ctx, 200*time.Millisecond) != nil {
			r.violated("%d records are unsent %s after all else has come to rest", unsent, unsentLimit)
			return waited, ctx.Err()
		}
	}
}

// repair sends those payments again that a deleted queue can have taken.
func (r *run) repair(ctx context.Context) (repaired int, err error) {
	if err := r.readTap(); err != nil {
		return 0, err
	}
	state, err := readState(ctx, r.arena.db, r.publisher.amounts(), r.tapped)
	if err != nil {
		return 0, err
	}
	for id := range state.sent {
		if (len(state.ledger[id]) == 0 || len(state.tapped[id]) == 0) && !r.publisher.mustArrive(id, bookings) {
			r.publisher.repair(id, bookings)
			repaired++
		}
		if state.audits[id] == 0 && !r.publisher.mustArrive(id, audits) {
			r.publisher.repair(id, audits)
			repaired++
		}
	}
	return repaired, nil
}

// readTap takes the published events from where nobody consumes them.
func (r *run) readTap() error {
	return r.arena.onChannel(func(channel *amqp091.Channel) error {
		for {
			delivery, found, err := channel.Get(tap, true)
			if err != nil || !found {
				return err
			}
			if err := r.tapEvent(delivery); err != nil {
				return err
			}
		}
	})
}

// judge reads the final state and fills in the report.
func (r *run) judge(ctx context.Context) error {
	if err := r.readTap(); err != nil {
		return err
	}
	state, err := readState(ctx, r.arena.db, r.publisher.amounts(), r.tapped)
	if err != nil {
		return err
	}
	state.relayed, state.poisoned = r.crew.tally.count("done "+relayPublish), r.crew.poisoned
	r.report.violations = append(r.report.violations, state.check()...)
	r.report.fill(r, state)
	return nil
}

func (r *run) tapEvent(delivery amqp091.Delivery) error {
	msg, err := inboxamqp.Marshaler{}.Unmarshal(delivery)
	if err != nil {
		return err
	}
	var e event
	if err := json.Unmarshal(msg.Payload, &e); err != nil {
		return err
	}
	if r.tapped[e.Payment] == nil {
		r.tapped[e.Payment] = map[string]int{}
	}
	r.tapped[e.Payment][msg.UUID]++
	return nil
}
