//go:build unix

package main

import (
	"errors"
	"os"
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
	"before " + routerPublish, "after " + routerPublish,
	"before " + relayPublish, "after " + relayPublish,
	"before ack", "after ack",
	string(inboxtest.BeforeMark), string(inboxtest.AfterMark),
}

// rarePoints are passed only after a failure, so a worker that is told to die there dies soon.
var rarePoints = []string{
	string(inboxtest.BeforeRollback), string(inboxtest.AfterRollback),
	"before " + relayPublish, "after " + relayPublish,
}

const (
	routerPublish = "publish"
	relayPublish  = "relay publish"
)

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

// reapedPublisher is the publisher of the router, or of the relay. What comes after it is the acknowledgement, or the mark.
type reapedPublisher struct {
	message.Publisher
	reaper *reaper
	step   string // routerPublish or relayPublish
	away   string // while this file is there, nothing can be published
}

var errAway = errors.New("the output is away")

func (p *reapedPublisher) Publish(topic string, messages ...*message.Message) error {
	p.reaper.pass("before " + p.step)
	if _, err := os.Stat(p.away); err == nil {
		return errAway
	}
	if err := p.Publisher.Publish(topic, messages...); err != nil {
		return err
	}
	say("done", p.step)
	p.reaper.pass("after " + p.step)
	return nil
}

func (p *reapedPublisher) ofRelay() message.Publisher {
	relays := *p
	relays.step = relayPublish
	return &relays
}
