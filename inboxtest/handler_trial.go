package inboxtest

import (
	"bytes"
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// outcome is what a run leaves.
type outcome struct {
	before, after string
	published     []string // as described, in order, one for each UUID
}

// trial is one fault on one fresh handler.
type trial struct {
	Handler
	clean *outcome // of the run without a fault; nil in that run itself
	n     int      // so many messages are published before the publish fails

	// What is done to the message; set before the first delivery.
	at         func(FaultPoint) error // in the repository
	loses      bool                   // the first transaction
	retries    bool                   // the first failed attempt, with the same message
	beforeWork func(*delivery)        // on the handler's first run
	afterWork  func(*delivery) error  // on the handler's first run, if it did not fail by itself

	before   string
	d        *deliveries
	injected atomic.Bool  // the fault
	runs     atomic.Int32 // of the handler
	mutex    sync.Mutex
	keys     []inbox.Key // under which the copies were claimed
}

// delivery is one delivery of the message.
type delivery struct {
	msg    *message.Message
	cancel context.CancelFunc
	ended  chan struct{} // the attempt; what follows is for after that

	answer   result
	err      error // of the attempt
	panicked string
	returned bool // the handler did, with nil
	produced int
	itself   result // the answer that the handler gave by itself, if any
}

type deliveryContextKey struct{}

func newTrial(t *testing.T, h Handler, clean *outcome, n int) (*trial, error) {
	t.Helper()
	if err := h.validate(); err != nil {
		return nil, &handlerFailure{what: err.Error(), last: true}
	}
	h.setDefaults()
	r := &trial{Handler: h, clean: clean, n: n, at: func(FaultPoint) error { return nil }}
	var err error
	if r.before, err = r.state(); err != nil {
		return nil, err
	}
	if clean != nil && r.before != clean.before {
		return nil, &handlerFailure{what: "the state before the message is not the one of the run without a fault",
			facts: stateFacts(clean.before, r.before), advice: notFresh}
	}
	repository := NewFaultRepository(&losingRepository{Repository: r.Repository, trial: r}, func(point FaultPoint, key inbox.Key) error {
		if point == BeforeClaim {
			r.mutex.Lock()
			if !slices.Contains(r.keys, key) {
				r.keys = append(r.keys, key)
			}
			r.mutex.Unlock()
		}
		return r.at(point)
	})
	r.Options.PublishBackOff = time.Nanosecond // each publish is tried once, so that a fault shows
	m, err := inbox.NewMiddleware(repository, r.Options)
	if err != nil {
		return nil, err
	}
	r.d = newDeliveries(t, m)
	r.d.topic = r.PublishTopic
	r.d.startRouter(true, r.handle, watch, r.retry, m.Middleware)
	return r, nil
}

// watch notes how the attempt ended.
func watch(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (produced []*message.Message, err error) {
		d := msg.Context().Value(deliveryContextKey{}).(*delivery)
		d.answer = neither // a Goexit
		defer func() {
			if panicked := recover(); panicked != nil {
				d.answer, d.panicked = nacked, fmt.Sprintf("%v\n%s", panicked, handlerStack(string(debug.Stack())))
				err = fmt.Errorf("panic: %v", panicked) // the router nacks both
			}
			close(d.ended)
		}()
		produced, err = next(msg)
		d.answer, d.err = "", err
		return produced, err
	}
}

// retry does what Watermill's Retry does.
func (r *trial) retry(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := next(msg)
		if err != nil && r.retries {
			r.retries = false
			return next(msg)
		}
		return produced, err
	}
}

// handle is the handler with the fault around it.
func (r *trial) handle(msg *message.Message) ([]*message.Message, error) {
	d := msg.Context().Value(deliveryContextKey{}).(*delivery)
	first := r.runs.Add(1) == 1
	if first && r.beforeWork != nil {
		r.injected.Store(true)
		r.beforeWork(d)
	}
	produced, err := r.Handle(msg)
	d.returned, d.produced = err == nil, len(produced)
	select {
	case <-d.msg.Acked():
		d.itself = acked
	case <-d.msg.Nacked():
		d.itself = nacked
	default:
	}
	if first && err == nil && r.afterWork != nil {
		r.injected.Store(true)
		err = r.afterWork(d)
	}
	return produced, err
}

// start delivers a copy of the message.
func (r *trial) start() *delivery {
	d := &delivery{msg: r.Message.Copy(), ended: make(chan struct{})}
	d.msg.Payload = bytes.Clone(d.msg.Payload) // a handler may write into it
	ctx := context.WithValue(context.WithoutCancel(r.Message.Context()), deliveryContextKey{}, d)
	ctx, d.cancel = context.WithTimeout(ctx, r.Timeout)
	r.d.t.Cleanup(d.cancel)
	d.msg.SetContext(ctx)
	r.d.messages <- d.msg
	return d
}

// wait waits for the answer. The handler has the time until its deadline, and as much again to notice.
func (r *trial) wait(d *delivery) error {
	select {
	case <-d.ended:
	case <-time.After(2 * r.Timeout):
		return &handlerFailure{what: fmt.Sprintf("the handler has not returned %s after the end of its context", r.Timeout), advice: isStuck, last: true}
	}
	if d.itself != "" {
		return &handlerFailure{what: fmt.Sprintf("the message was %s by the handler itself, before anything was committed", d.itself), advice: answersItself}
	}
	if d.answer == neither {
		return nil
	}
	select {
	case <-d.msg.Acked():
		d.answer = acked
	case <-d.msg.Nacked():
		d.answer = nacked
	}
	return nil
}

func (r *trial) deliver() (*delivery, error) {
	d := r.start()
	return d, r.wait(d)
}

// handled delivers the message and fails unless it is acknowledged.
func (r *trial) handled() error {
	d, err := r.deliver()
	if err != nil || d.answer == acked {
		return err
	}
	return r.refused(d, "the message is not acknowledged")
}

// redeliver delivers the message until it is acknowledged, as a broker does.
func (r *trial) redeliver() error {
	for attempt := 1; ; attempt++ {
		d, err := r.deliver()
		if err != nil || d.answer == acked {
			return err
		}
		if attempt == 5 {
			return r.refused(d, "the redelivered message is not acknowledged")
		}
	}
}

// refused is the failure of a delivery to which nothing was done and which should have been acknowledged.
func (r *trial) refused(d *delivery, what string) error {
	f := &handlerFailure{what: what, facts: []string{fmt.Sprintf("the message was %s", d.answer)}}
	switch {
	case d.panicked != "":
		f.facts = append(f.facts, "panic: "+d.panicked)
		f.advice = advice{"the handler panics on the message as it is", "fix it; a panic is rolled back and the message comes again and again"}
	case d.answer == neither:
		f.advice = advice{
			"the handler ended its goroutine by runtime.Goexit, which t.FailNow and t.Fatal call",
			"return an error; in a handler, no t.Fatal",
		}
	default:
		f.facts = append(f.facts, fmt.Sprintf("error: %v", d.err))
		f.advice = whyRefused(d.err)
	}
	after, err := r.state()
	if err != nil {
		return err
	}
	f.facts = append(f.facts, fmt.Sprintf("state before: %q", r.before), fmt.Sprintf("state after:  %q", after))
	if after != r.before && r.clean == nil {
		f.what += ", and yet the state has changed"
		if f.advice, err = r.whyChanged(); err != nil {
			return err
		}
	}
	return f
}

// whyChanged says why an attempt that was rolled back has changed the state: a handler that has committed
// by itself has committed the claim as well.
func (r *trial) whyChanged() (advice, error) {
	processed, err := r.processed()
	if processed {
		return commitsItself, err
	}
	return writesAround, err
}

// processed reports whether the message's record is committed.
func (r *trial) processed() (bool, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, key := range r.keys {
		transaction, record, err := r.Repository.Claim(ctx, inbox.ClaimParams{Key: key})
		if err != nil {
			return false, fmt.Errorf("cannot look for the record of %s: %w", key, err)
		}
		if record != nil {
			return true, nil
		}
		if err := transaction.Rollback(); err != nil {
			return false, fmt.Errorf("cannot roll back: %w", err)
		}
	}
	return false, nil
}

func (r *trial) state() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	state, err := r.State(ctx)
	if err != nil {
		return "", &handlerFailure{what: fmt.Sprintf("State failed: %v", err), last: r.clean == nil}
	}
	return state, nil
}

// published is what the broker has taken, once for each UUID.
func (r *trial) published() ([]string, error) {
	for _, attempt := range r.d.allAttempts() {
		seen := map[string]bool{}
		for _, msg := range attempt {
			if seen[msg.UUID] {
				return nil, &handlerFailure{what: fmt.Sprintf("two of the %d messages that the handler returned have the UUID %q", len(attempt), msg.UUID), advice: sharesUUID}
			}
			seen[msg.UUID] = true
		}
	}
	contents := map[string]string{}
	descriptions := []string{}
	for _, msg := range r.d.allPublished() {
		got := content(msg)
		if before, again := contents[msg.UUID]; !again {
			contents[msg.UUID] = got
			descriptions = append(descriptions, r.Describe(msg))
		} else if before != got {
			return nil, &handlerFailure{what: fmt.Sprintf("a message was published twice under the UUID %q, with two contents", msg.UUID),
				facts: []string{"first: " + before, "then:  " + got}, advice: sharesUUID}
		}
	}
	slices.Sort(descriptions)
	return descriptions, nil
}

// wantState fails unless this is the committed state.
func (r *trial) wantState(want, what string, why func() (advice, error)) error {
	got, err := r.state()
	if err != nil || got == want {
		return err
	}
	because, err := why()
	if err != nil {
		return err
	}
	return &handlerFailure{what: what, facts: stateFacts(want, got), advice: because}
}

// wantClean fails unless state and published messages are as after the run without a fault.
func (r *trial) wantClean(because advice) error {
	if err := r.wantOneKey(); err != nil {
		return err
	}
	err := r.wantState(r.clean.after, "in the end the state is not the one of the run without a fault", func() (advice, error) { return because, nil })
	if err != nil {
		return err
	}
	got, err := r.published()
	if err != nil {
		return err
	}
	if !slices.Equal(got, r.clean.published) {
		return &handlerFailure{what: "in the end the published messages are not those of the run without a fault",
			facts: []string{fmt.Sprintf("expected: %q", r.clean.published), fmt.Sprintf("seen:     %q", got)}, advice: because}
	}
	return nil
}

// wantOneRun fails unless the handler ran once, although copies came after its commit.
func (r *trial) wantOneRun() error {
	if err := r.wantOneKey(); err != nil {
		return err
	}
	if runs := r.runs.Load(); runs != 1 {
		return &handlerFailure{what: fmt.Sprintf("the handler ran %d times, although its first run was committed", runs), advice: replacesTransaction}
	}
	return nil
}

func (r *trial) wantOneKey() error {
	if len(r.keys) > 1 {
		return &handlerFailure{what: "copies of the message were claimed under different keys", facts: []string{fmt.Sprint(r.keys)}, advice: changesKey}
	}
	return nil
}

// rolledBack delivers the message with a fault that must leave nothing behind, and then again.
func (r *trial) rolledBack(want result) error {
	d, err := r.deliver()
	if err != nil {
		return err
	}
	if !r.injected.Load() {
		return r.refused(d, "the handler failed before the fault")
	}
	err = r.wantState(r.before, "the state has changed although the transaction was rolled back", r.whyChanged)
	if err != nil {
		return err
	}
	if d.answer != want {
		return &handlerFailure{what: fmt.Sprintf("the message was %s, want it %s", d.answer, want), facts: []string{fmt.Sprintf("error: %v", d.err)}}
	}
	if err := r.redeliver(); err != nil {
		return err
	}
	return r.wantClean(remembers)
}

// committed delivers the message with a fault that comes after its commit, and then again.
func (r *trial) committed() error {
	d, err := r.deliver()
	if err != nil {
		return err
	}
	if !r.injected.Load() {
		return r.refused(d, "the handler failed before the fault")
	}
	err = r.wantState(r.clean.after, "the state is not the one of the run without a fault", func() (advice, error) { return remembers, nil })
	if err != nil {
		return err
	}
	if d.answer != nacked {
		return &handlerFailure{what: fmt.Sprintf("the message was %s, want it %s", d.answer, nacked)}
	}
	if err := r.redeliver(); err != nil {
		return err
	}
	if err := r.wantOneRun(); err != nil {
		return err
	}
	return r.wantClean(remembers)
}
