package inbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// Middleware makes the effect of a message happen once, however often the message is delivered.
// All that is dangerous (claim, panic, rollback, commit, the message's context) happens in this file.
type Middleware struct {
	repository   Repository
	options      Options
	expectations expectations
	marker       *marker
	routers      sync.Map // to which AddTo has added the publisher decorator
	notPublished sync.Map // handlers of which this was said
}

// NewMiddleware returns the inbox middleware. It opens no connection. One middleware serves any number of
// handlers and routers at once.
func NewMiddleware(repository Repository, options Options) (*Middleware, error) {
	if repository == nil {
		return nil, errors.New("inbox: repository is nil")
	}
	if err := options.Validate(); err != nil {
		return nil, err
	}
	options.setDefaults()
	return &Middleware{repository: repository, options: options, marker: newMarker(repository, options)}, nil
}

// Close marks the stored messages that are known to be sent and waits for those whose message is not yet
// acknowledged, until ctx ends; it then returns the context's error. Call it after the router has stopped
// and before the database is closed. What is not marked is sent once more with the next copy, and kept by
// the [Cleaner]. A message that nobody answers, as when a handler is called without a router, is waited for as well. It
// may be called more than once; the middleware still works afterwards, without marking.
func (m *Middleware) Close(ctx context.Context) error {
	return m.marker.close(ctx)
}

// Middleware is the handler middleware to add to a router or to one handler. Inside of Watermill's Retry,
// so that every attempt has a transaction of its own; see the package documentation for the whole order.
func (m *Middleware) Middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (produced []*message.Message, err error) {
		outer := msg.Context()
		a := &attempt{Middleware: m, started: time.Now(), outer: outer, msg: msg, observation: Observation{Outcome: Failed}}
		defer func() { a.report(err) }()
		a.inner.Context = outer
		a.inner.key = a.fixKey()
		defer func() {
			if a.observation.Outcome == Failed {
				a.delivery.restore(msg)
			}
		}()
		if err := a.inner.key.Validate(); err != nil {
			return nil, a.failed("key", err)
		}
		if err := outer.Err(); err != nil {
			return nil, a.failed("claim", err)
		}
		if _, open := TransactionFromContext[Transaction](outer); open {
			if key, _ := KeyFromContext(outer); key == a.inner.key {
				return nil, a.failed("claim", Permanent(errors.New("the inbox is added twice, so the message waits for itself")))
			}
		}
		return a.process(h)
	}
}

// attempt is one run of one delivery through the middleware.
type attempt struct {
	*Middleware
	started time.Time
	waited  time.Duration   // what the claim took, another copy's run included
	outer   context.Context // the message's
	own     delivery        // of this attempt alone, without [Middleware.Delivery]
	inner   handlerContext  // the handler's, with the key and the transaction
	msg     *message.Message
	claimed bool // or found to be a duplicate

	delivery *delivery

	processedAt time.Time // of the claim with which produced messages are stored
	rolledBack  bool

	observation Observation
}

func (a *attempt) process(h message.HandlerFunc) (produced []*message.Message, err error) {
	// The transaction lives as long as this context: it ends with the message's until the commit begins,
	// and with the claim timeout until the claim is there.
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(a.outer))
	defer cancel(nil)
	detach := context.AfterFunc(a.outer, func() { cancel(context.Cause(a.outer)) })
	defer detach()

	transaction, record, err := a.claim(ctx, cancel)
	if err != nil {
		return nil, a.failed("claim", err)
	}
	a.claimed = true
	if record != nil {
		return a.duplicate(record)
	}

	// From here on every way out ends the transaction. A panic keeps its value and runtime.Goexit goes on, and both
	// pass through here.
	a.inner.open.Transaction = transaction
	defer func() {
		// First, so that no goroutine that kept the context finds a transaction that is about to end.
		a.inner.open.ended.Store(true)
		if a.observation.Outcome == Processed || a.rolledBack {
			return
		}
		lost := transaction.Rollback()
		if errors.Is(lost, ErrTransactionBroken) {
			// A panic that would be tried again: then what the handler has committed would pass for a duplicate.
			if value := recover(); value != nil {
				produced, err = nil, a.failed("handler", fmt.Errorf("%w; then it panicked: %v\n%s", lost, value, debug.Stack()))
			}
		} else if lost != nil {
			a.log("Rolling back failed, the database will do it", watermill.LogFields{"error": lost.Error()})
		}
	}()

	if err := a.judgeAge(); err != nil {
		return nil, a.failed("claim", err)
	}
	produced, err = a.handle(h)
	if err != nil {
		return nil, a.afterHandler(transaction, err)
	}
	step, produced, err := a.store(ctx, transaction, produced)
	if err != nil {
		return nil, a.failed(step, err)
	}
	a.inner.open.ended.Store(true)
	if !detach() {
		return nil, a.failed("commit", context.Cause(a.outer))
	}
	// No cancellation reaches the commit, which would only hide whether it took effect.
	if err := transaction.Commit(ctx); err != nil {
		return nil, a.failed("commit", err)
	}
	a.observation.Outcome = Processed
	if len(produced) > 0 {
		a.outlive(produced)
		a.expect(a.processedAt, produced)
	}
	return produced, nil
}

// afterHandler rolls back and returns the handler's error, unless there is a worse one.
func (a *attempt) afterHandler(transaction Transaction, err error) error {
	a.inner.open.ended.Store(true)
	a.rolledBack = true
	lost := transaction.Rollback()
	switch {
	case errors.Is(lost, ErrTransactionBroken):
		return a.failed("handler", fmt.Errorf("%w; it returned: %v", lost, err))
	case isTransient(lost) && a.outer.Err() == nil && !isTimeLimit(err):
		// A dead connection is the likely reason for whatever the handler met.
		return a.failed("handler", errors.Join(err, lost))
	}
	return err
}

// claim opens the transaction and claims the key, within the claim timeout.
func (a *attempt) claim(ctx context.Context, cancel context.CancelCauseFunc) (Transaction, *Record, error) {
	timer := time.AfterFunc(a.options.ClaimTimeout, func() { cancel(ErrInFlight) })
	transaction, record, err := a.repository.Claim(ctx, ClaimParams{Key: a.inner.key})
	a.waited = time.Since(a.started)
	if timer.Stop() {
		return transaction, record, err
	}

	// The timer has ended the transaction's context, perhaps just after the claim.
	if err == nil && transaction != nil {
		err = transaction.Rollback()
	}
	if err == nil {
		err = context.Cause(ctx)
	}
	if a.outer.Err() == nil {
		// Not wrapped: the driver says "canceled", and the router hides what was cancelled.
		err = fmt.Errorf("%w (after %s: %v)", ErrInFlight, a.waited.Round(time.Millisecond), err)
	}
	return nil, nil, err
}

// handle runs the handler with the transaction and the key in the message's context, and leaves the
// message's context as it was.
func (a *attempt) handle(h message.HandlerFunc) ([]*message.Message, error) {
	defer a.msg.SetContext(a.outer)
	a.msg.SetContext(&a.inner)

	produced, err := h(a.msg)
	if a.outer.Err() != nil {
		// The transaction has ended with the context. Whatever the handler made of that, it is the reason.
		return nil, a.failed("handler", err)
	}
	if err != nil {
		a.logCancelled(err)
		return nil, err
	}
	return produced, nil
}

// failed returns the error of one of our steps. When the message's context has ended, that is part of
// it, whatever the driver said: drivers report a cancelled context in several ways.
func (a *attempt) failed(step string, err error) error {
	if ended := a.outer.Err(); ended != nil && !errors.Is(err, ended) {
		err = errors.Join(err, ended)
	}
	err = &Error{Step: step, Key: a.inner.key, Err: err}
	a.logCancelled(err)
	return err
}

// logCancelled logs what the router does not: it nacks a cancelled message without a line.
func (a *attempt) logCancelled(err error) {
	if errors.Is(err, context.Canceled) {
		a.options.Logger.Error("Message not processed, its context was cancelled", err, a.fields())
	}
}
