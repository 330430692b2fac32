package inboxtest

import (
	"errors"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// Every step fails once, before it is done and after; the redelivery has the effect once.
var faultCases = []kitCase{
	{"a failing claim", func(k *kit) { k.failOnce(BeforeClaim, "claim", 1) }},
	{"a claim whose answer is lost", func(k *kit) { k.failOnce(AfterClaim, "claim", 1) }},
	{"a failing store", func(k *kit) { k.failOnce(BeforeStore, "store", 2) }},
	{"a store whose answer is lost", func(k *kit) { k.failOnce(AfterStore, "store", 2) }},
	{"a failing commit", func(k *kit) { k.failOnce(BeforeCommit, "commit", 2) }},
	{"a commit whose answer is lost", func(k *kit) { k.failOnce(AfterCommit, "commit", 1) }},
	{"a handler error and then a failing rollback", func(k *kit) {
		// Field case 49 c.
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
	}},
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
