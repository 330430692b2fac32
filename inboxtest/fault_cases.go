package inboxtest

import (
	"context"
	"database/sql/driver"
	"errors"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// Every step fails once, before it is done and after; the redelivery has the effect once.
var faultCases = []kitCase{
	{"a failing claim", claimFails},
	{"a claim whose answer is lost", claimAnswerIsLost},
	{"a failing store", storeFails},
	{"a store whose answer is lost", storeAnswerIsLost},
	{"a failing commit", commitFails},
	{"a commit whose answer is lost", commitAnswerIsLost},
	{"the transaction is out of reach when it ends", transactionIsOutOfReach},
	{"a context that ends just before the commit stops it", contextEndsJustBeforeCommit},
	{"a context that ends ends the wait for the claim", contextEndsWaitForClaim},
	{"a claim that arrives just after the claim timeout is rolled back", claimArrivesAfterTimeout},
	{"a cancelled handler whose connection is lost as well is logged once", cancelledHandlerLosesConnection},
	{"a handler error on a lost connection is not poisoned", handlerErrorOnLostConnection},
	{"the inbox added twice is refused", inboxAddedTwice},
	{"a handler error and then a failing rollback", handlerErrorThenFailingRollback},
}

func claimFails(k *kit)         { k.failOnce(BeforeClaim, "claim", 1) }
func claimAnswerIsLost(k *kit)  { k.failOnce(AfterClaim, "claim", 1) }
func storeFails(k *kit)         { k.failOnce(BeforeStore, "store", 2) }
func storeAnswerIsLost(k *kit)  { k.failOnce(AfterStore, "store", 2) }
func commitFails(k *kit)        { k.failOnce(BeforeCommit, "commit", 2) }
func commitAnswerIsLost(k *kit) { k.failOnce(AfterCommit, "commit", 1) }

func transactionIsOutOfReach(k *kit) {
	for _, fails := range []error{nil, errors.New("handler failed")} {
		var kept context.Context
		repository := NewFaultRepository(k.Repository, func(point FaultPoint, _ inbox.Key) error {
			if (point == BeforeCommit || point == BeforeRollback) && kept != nil && k.HasTransaction(kept) {
				k.Errorf("%s the transaction is still found in the handler's context", point)
			}
			return nil
		})
		d := k.deliver(repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
			kept = msg.Context()
			return nil, fails
		})
		d.send(k.key(), k.context())
		if k.HasTransaction(kept) {
			k.Error("the transaction is found after its end")
		}
	}
}

func contextEndsJustBeforeCommit(k *kit) {
	ctx, cancel := context.WithCancel(k.context())
	repository := NewFaultRepository(k.Repository, func(point FaultPoint, _ inbox.Key) error {
		switch point {
		case AfterStore:
			cancel()
		case BeforeCommit:
			k.Error("the commit was tried")
		}
		return nil
	})
	d := k.deliver(repository, inbox.Options{}, true, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("event", nil)}, k.Write(msg.Context(), msg.UUID)
	})
	if got := d.send(k.key(), ctx); got != nacked {
		k.Fatalf("the message was %s", got)
	}
	if err := d.lastError(); !errors.Is(err, context.Canceled) {
		k.Fatalf("the error is %v", err)
	}
	k.wantEffects()
}

func contextEndsWaitForClaim(k *kit) {
	key := inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}
	first := k.claim(k.context(), key)
	type contextKey struct{}
	entered := make(chan struct{})
	repository := &observedClaim{Repository: k.Repository, observe: func(ctx context.Context) {
		if ctx.Value(contextKey{}) != "value" {
			k.Error("the values of the message's context are lost")
		}
		close(entered)
	}}
	d := k.deliver(repository, inbox.Options{}, false, func(*message.Message) ([]*message.Message, error) {
		k.Error("the handler ran")
		return nil, nil
	})
	ctx, cancel := context.WithCancel(context.WithValue(k.context(), contextKey{}, "value"))
	second := d.start(key, ctx)
	<-entered
	cancel()
	if got := d.wait(second); got != nacked {
		k.Fatalf("the copy was %s", got)
	}
	err := d.lastError()
	if !errors.Is(err, context.Canceled) || errors.Is(err, inbox.ErrInFlight) {
		k.Fatalf("the error is %v, want the context's", err)
	}
	k.wantNotPoisoned(err)
	if err := first.Rollback(); err != nil {
		k.Fatal(err)
	}
}

func claimArrivesAfterTimeout(k *kit) {
	const timeout = 100 * time.Millisecond
	late := true
	repository := NewFaultRepository(k.Repository, func(point FaultPoint, _ inbox.Key) error {
		if point == AfterClaim && late {
			late = false
			time.Sleep(2 * timeout) // there is no signal for a timer that has fired
		}
		return nil
	})
	var runs atomic.Int32
	d := k.deliver(repository, inbox.Options{ClaimTimeout: timeout}, false, k.effect(&runs))
	key := k.key()
	d.want(nacked, key)
	if err := d.lastError(); !errors.Is(err, inbox.ErrInFlight) {
		k.Fatalf("the error is %v, want it to match ErrInFlight", err)
	}
	k.wantRuns(&runs, 0)
	k.process(inbox.Key{Consumer: consumer, MessageID: key.MessageID}, "effect") // waits for the rollback
}

func cancelledHandlerLosesConnection(k *kit) {
	repository := NewFaultRepository(k.Repository, func(point FaultPoint, _ inbox.Key) error {
		if point == AfterRollback {
			return driver.ErrBadConn
		}
		return nil
	})
	logger := newCapture()
	ctx, cancel := context.WithCancel(k.context())
	d := k.deliver(repository, inbox.Options{Logger: logger}, false, func(msg *message.Message) ([]*message.Message, error) {
		cancel()
		return nil, nil
	})
	if got := d.send(k.key(), ctx); got != nacked {
		k.Fatalf("the message was %s", got)
	}
	if lines := logger.errors(); len(lines) != 1 {
		k.Fatalf("error lines are %q, want one", lines)
	}
}

func handlerErrorOnLostConnection(k *kit) {
	repository := NewFaultRepository(k.Repository, func(point FaultPoint, _ inbox.Key) error {
		if point == AfterRollback {
			return driver.ErrBadConn
		}
		return nil
	})
	failure := errors.New("unexpected EOF")
	d := k.deliver(repository, inbox.Options{}, false, func(*message.Message) ([]*message.Message, error) { return nil, failure })
	d.want(nacked, k.key())
	if err := d.lastError(); !errors.Is(err, failure) {
		k.Fatalf("the error is %v, want it to match the handler's", err)
	}
	k.wantNotPoisoned(d.lastError())
}

func inboxAddedTwice(k *kit) {
	m := k.newMiddleware(k.Repository)
	d := k.newDeliveries(m)
	d.startRouter(false, k.effect(new(atomic.Int32)), m.Middleware, m.Middleware)
	d.want(nacked, k.key())
	if err := d.lastError(); !inbox.ShouldPoison(err) {
		k.Fatalf("the error is %v, want a permanent one", err)
	}
	k.wantEffects()
}

func handlerErrorThenFailingRollback(k *kit) {
	failure := errors.New("handler failed")
	fails := true
	repository := NewFaultRepository(k.Repository, func(point FaultPoint, _ inbox.Key) error {
		if point == BeforeRollback {
			return errors.New("no rollback")
		}
		return nil
	})
	d := k.deliver(repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
		err := k.Write(msg.Context(), msg.UUID)
		if fails {
			fails = false
			return nil, failure
		}
		return nil, err
	})
	key := k.key()
	d.want(nacked, key)
	if err := d.lastError(); err != failure {
		k.Fatalf("the error is %v, want the handler's", err)
	}
	d.want(acked, key)
	k.wantEffects(key.MessageID)
}

// failOnce lets a point fail once and delivers until it is acked.
func (k *kit) failOnce(fail FaultPoint, step string, wantRuns int32) {
	k.Helper()
	lost := errors.New("the connection is lost")
	var failed atomic.Bool
	repository := NewFaultRepository(k.Repository, func(point FaultPoint, _ inbox.Key) error {
		if point == fail && failed.CompareAndSwap(false, true) {
			return lost
		}
		return nil
	})
	var runs atomic.Int32
	d := k.deliver(repository, inbox.Options{}, true, func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		return []*message.Message{message.NewMessage("event", nil)}, k.Write(msg.Context(), msg.UUID)
	})
	key := k.key()
	d.want(nacked, key)
	var own *inbox.Error
	if err := d.lastError(); !errors.As(err, &own) || own.Step != step || own.Key != (inbox.Key{Consumer: consumer, MessageID: key.MessageID}) || !errors.Is(err, lost) {
		k.Fatalf("the error is %v, want an *inbox.Error of step %s that wraps the cause", err, step)
	}
	k.wantNotPoisoned(d.lastError())
	if len(d.allPublished()) != 0 {
		k.Fatal("messages of a failed attempt were published")
	}
	d.want(acked, key)
	k.wantRuns(&runs, wantRuns)
	k.wantEffects(key.MessageID)
	if got := len(d.allPublished()); got != 1 {
		k.Fatalf("%d messages were published, want 1", got)
	}
}

// observedClaim reports the context that a claim is given.
type observedClaim struct {
	inbox.Repository
	observe func(context.Context)
}

func (o *observedClaim) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	o.observe(ctx)
	return o.Repository.Claim(ctx, params)
}
