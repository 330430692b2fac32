//go:build unix

package main

import (
	"sync/atomic"
	"syscall"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

// points are where a worker can be told to die: the steps of a message's flow, in their order.
var points = []string{
	string(inboxtest.BeforeClaim), string(inboxtest.AfterClaim),
	"before effect", "after effect",
	string(inboxtest.BeforeStore), string(inboxtest.AfterStore),
	string(inboxtest.BeforeCommit), string(inboxtest.AfterCommit),
	string(inboxtest.BeforeRollback), string(inboxtest.AfterRollback),
	"before publish", "after publish",
	"before ack", "after ack",
	string(inboxtest.BeforeMark), string(inboxtest.AfterMark),
}

// death is at which passage of a point a worker dies; without a point it does not.
type death struct {
	Point string
	Count int64
}

// reaper kills its own process.
type reaper struct {
	death  death
	passed atomic.Int64
}

// pass is called wherever the worker may die.
func (r *reaper) pass(point string) {
	if point != r.death.Point || r.passed.Add(1) != r.death.Count {
		return
	}
	say("dying", point)
	_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
	select {} // nothing more happens here
}

func (r *reaper) fault(point inboxtest.FaultPoint, _ inbox.Key) error {
	r.pass(string(point))
	return nil
}

// aroundAcknowledgement is outermost. A handler that publishes nothing is acknowledged right after it.
func (r *reaper) aroundAcknowledgement(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := h(msg)
		if err != nil {
			return nil, err
		}
		if len(produced) == 0 {
			r.pass("before ack")
		}
		if r.death.Point == "after ack" {
			go func() {
				select {
				case <-msg.Acked():
					r.pass("after ack")
				case <-msg.Nacked():
				}
			}()
		}
		return produced, nil
	}
}

// reapedPublisher is the router's publisher: what comes after it is the acknowledgement.
type reapedPublisher struct {
	message.Publisher
	reaper *reaper
}

func (p *reapedPublisher) Publish(topic string, messages ...*message.Message) error {
	p.reaper.pass("before publish")
	if err := p.Publisher.Publish(topic, messages...); err != nil {
		return err
	}
	p.reaper.pass("after publish")
	return nil
}
