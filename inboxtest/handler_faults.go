package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// handlerFault is one thing that happens to a message.
type handlerFault struct {
	name     string
	run      func(*trial) error
	messages bool // only if the handler returns messages to the router
	counts   bool // once after each number of them, trial.n
}

// withoutFault gives what the others are compared with.
var withoutFault = handlerFault{name: "no fault", run: func(r *trial) error {
	if err := r.handled(); err != nil {
		return err
	}
	clean := &outcome{before: r.before}
	var err error
	if clean.after, err = r.state(); err != nil {
		return err
	}
	if clean.published, err = r.published(); err != nil {
		return err
	}
	if clean.after == clean.before && len(clean.published) == 0 {
		return &handlerFailure{what: "State does not see what the handler writes: it is the same before and after the message, and nothing was published",
			facts: []string{fmt.Sprintf("state: %q", clean.after)}, advice: advice{
				"State reads the wrong place, or the handler ignores this message",
				"let State return all that the handler writes; a test that sees no effect cannot fail",
			}}
	}
	r.clean = clean
	return nil
}}

var handlerFaults = []handlerFault{
	{name: "no fault, once more from the start, and a while later", run: func(r *trial) error {
		if err := r.handled(); err != nil {
			return err
		}
		err := r.wantClean(advice{
			"the handler's work depends on something other than the message and the database, or State or Describe shows what no two runs share: a time, a random id, a number from a sequence",
			"let State and Describe leave that out; without faults, two runs must give the same",
		})
		if err != nil {
			return err
		}
		time.Sleep(aWhile)
		return r.wantState(r.clean.after, "the state has changed after the message was acknowledged", func() (advice, error) { return leavesGoroutine, nil })
	}},
	{name: "the commit comes late", run: func(r *trial) error {
		r.at = func(point FaultPoint) error {
			if point == BeforeCommit {
				time.Sleep(aWhile)
			}
			return nil
		}
		if err := r.handled(); err != nil {
			return err
		}
		return r.wantClean(leavesGoroutine)
	}},
	{name: "a copy afterwards", run: func(r *trial) error {
		if err := r.handled(); err != nil {
			return err
		}
		if err := r.redeliver(); err != nil {
			return err
		}
		if err := r.wantOneRun(); err != nil {
			return err
		}
		return r.wantClean(replacesTransaction)
	}},
	{name: "a copy while the first is handled", run: copyInParallel},

	{name: "the handler returns an error after its work", run: func(r *trial) error {
		r.afterWork = func(*delivery) error { return errInjected }
		return r.rolledBack(nacked)
	}},
	{name: "the handler returns an error after its work, and Retry calls it again", run: func(r *trial) error {
		r.retries = true
		r.afterWork = func(*delivery) error { return errInjected }
		d, err := r.deliver()
		if err != nil {
			return err
		}
		if !r.injected.Load() {
			return r.refused(d, "the handler failed before the fault")
		}
		if d.answer != acked {
			return r.refused(d, "the second attempt failed. Each attempt of Retry gets the same message: the handler must not change it")
		}
		return r.wantClean(advice{
			"the handler changes the message that it is given, its payload or its metadata: Retry calls it again with the same one. Or it writes around its transaction: then the other faults say so too. Or " + remembers.cause,
			"work on msg.Copy(), and on a copy of its payload; " + remembers.fix,
		})
	}},
	{name: "the handler panics after its work", run: func(r *trial) error {
		r.afterWork = func(*delivery) error { panic(errInjected) }
		return r.rolledBack(nacked)
	}},
	{name: "the handler ends its goroutine after its work", run: func(r *trial) error {
		r.afterWork = func(*delivery) error {
			runtime.Goexit()
			return nil
		}
		return r.rolledBack(neither)
	}},
	{name: "the context is cancelled before the work", run: func(r *trial) error {
		r.beforeWork = func(d *delivery) { d.cancel() }
		return r.rolledBack(nacked)
	}},
	{name: "the context is cancelled after the work", run: func(r *trial) error {
		r.afterWork = func(d *delivery) error {
			d.cancel()
			return nil
		}
		return r.rolledBack(nacked)
	}},
	{name: "the transaction is lost before the work", run: func(r *trial) error {
		r.loses = true
		var first *delivery
		r.beforeWork = func(d *delivery) { first = d }
		if err := r.rolledBack(nacked); err != nil {
			return err
		}
		// What was returned may be all the work there is, when an outbox writes it.
		inOutbox := r.Options.Outbox != nil && first.produced > 0
		if first.returned && r.clean.after != r.clean.before && !inOutbox {
			return &handlerFailure{what: "the handler returned nil although every statement in its transaction failed", advice: ignoresErrors}
		}
		return nil
	}},

	{name: "the claim fails", run: func(r *trial) error { return r.failAt(BeforeClaim).rolledBack(nacked) }},
	{name: "the claim's answer is lost", run: func(r *trial) error { return r.failAt(AfterClaim).rolledBack(nacked) }},
	{name: "the store of the messages fails", messages: true, run: func(r *trial) error { return r.failAt(BeforeStore).rolledBack(nacked) }},
	{name: "the answer to the store of the messages is lost", messages: true, run: func(r *trial) error { return r.failAt(AfterStore).rolledBack(nacked) }},
	{name: "the commit fails", run: func(r *trial) error { return r.failAt(BeforeCommit).rolledBack(nacked) }},
	{name: "the commit's answer is lost", run: func(r *trial) error { return r.failAt(AfterCommit).committed() }},
	{name: "the publish fails", messages: true, counts: true, run: func(r *trial) error {
		r.d.failPublishAfter(1, r.n)
		r.at = func(point FaultPoint) error {
			if point == AfterCommit {
				r.injected.Store(true) // the publish is next
			}
			return nil
		}
		return r.committed()
	}},
}

var errInjected = errors.New("injected by inboxtest.TestHandler")

// aWhile is given to goroutines that a handler may have left behind. Nothing signals that they are done.
const aWhile = 300 * time.Millisecond

// failAt lets a step of the repository fail once.
func (r *trial) failAt(fails FaultPoint) *trial {
	r.at = func(point FaultPoint) error {
		if point == fails && r.injected.CompareAndSwap(false, true) {
			return errInjected
		}
		return nil
	}
	return r
}

// losingRepository loses the first transaction, as a killed connection does.
type losingRepository struct {
	inbox.Repository
	trial *trial
}

func (l *losingRepository) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	transaction, record, err := l.Repository.Claim(ctx, params)
	if err == nil && record == nil && l.trial.loses {
		l.trial.loses = false
		err = transaction.Rollback()
	}
	return transaction, record, err
}

// copyInParallel holds the first copy after its work, until the second has been waiting for it.
func copyInParallel(r *trial) error {
	worked, leave := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(leave) })
	defer release()
	r.afterWork = func(*delivery) error {
		close(worked)
		<-leave
		return nil
	}
	claims := make(chan struct{}, 2) // begun
	r.at = func(point FaultPoint) error {
		if point == BeforeClaim {
			select {
			case claims <- struct{}{}:
			default:
			}
		}
		return nil
	}

	first := r.start()
	select {
	case <-worked:
	case <-first.ended:
		if err := r.wait(first); err != nil {
			return err
		}
		return r.refused(first, "the handler failed before the fault")
	case <-time.After(2 * r.Timeout):
		return r.wait(first)
	}
	<-claims
	second := r.start()
	select {
	case <-claims:
	case <-second.ended:
	}
	select {
	case <-second.ended:
	case <-time.After(aWhile): // nothing signals that it still waits
	}
	release()

	for _, d := range []*delivery{first, second} {
		if err := r.wait(d); err != nil {
			return err
		}
	}
	if first.answer != acked || second.answer != acked {
		if err := r.redeliver(); err != nil {
			return err
		}
	}
	return r.wantClean(advice{
		"both copies had their effect, or neither: the handler works outside of its transaction, where the claim does not hold the second one back",
		writesAround.fix,
	})
}

// testHandler runs all faults, one after the other.
func testHandler(t *testing.T, constructor func(t *testing.T) Handler, report func(t *testing.T, failure error)) {
	t.Helper()
	s := &handlerTest{constructor: constructor, report: report}
	for _, fault := range slices.Concat([]handlerFault{withoutFault}, handlerFaults) {
		if s.over {
			return
		}
		t.Run(fault.name, func(t *testing.T) { s.test(t, fault) })
	}
}

type handlerTest struct {
	constructor func(t *testing.T) Handler
	report      func(t *testing.T, failure error)
	clean       *outcome // of the run without a fault
	over        bool     // the faults that are left would show nothing
}

func (s *handlerTest) test(t *testing.T, fault handlerFault) {
	switch {
	case fault.name == withoutFault.name:
		s.over = true // unless it succeeds
		s.clean = s.try(t, fault, 0)
		s.over = s.clean == nil
		return
	case s.clean == nil: // go test -run has chosen this fault alone
		t.Run(withoutFault.name, func(t *testing.T) { s.test(t, withoutFault) })
		if s.over {
			return
		}
	}
	count := len(s.clean.published)
	if fault.messages && count == 0 {
		t.Skip("the handler returns no messages to the router")
	}
	if !fault.counts {
		s.try(t, fault, 0)
		return
	}
	for n := range count + 1 {
		if s.over {
			return
		}
		if n < 3 || n > count-2 { // of many messages the first and the last will do
			variant := fault
			variant.name = fmt.Sprintf("%s after %d of %d messages", fault.name, n, count)
			t.Run(fmt.Sprint(n), func(t *testing.T) { s.try(t, variant, n) })
		}
	}
}

// try runs a fault on a fresh handler, and returns the outcome of the run without a fault.
func (s *handlerTest) try(t *testing.T, fault handlerFault, n int) *outcome {
	t.Helper()
	r, err := newTrial(t, s.constructor(t), s.clean, n)
	if err == nil {
		err = fault.run(r)
	}
	if err == nil {
		return r.clean
	}
	var failure *handlerFailure
	s.over = s.over || errors.As(err, &failure) && failure.last
	s.report(t, fmt.Errorf("%s: %w", fault.name, err))
	return nil
}
