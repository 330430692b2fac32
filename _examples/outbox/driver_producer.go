//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// producer publishes orders, each at least as often as it is told to: what is not confirmed is repeated.
type producer struct {
	topic     string
	publisher message.Publisher
	messages  []*message.Message
	sum       int64 // of all orders, each counted once, in cents

	released chan struct{} // an element for each message that may be published
	sent     int           // into released
	inFlight atomic.Int64  // publishes that have no answer yet
	stored   atomic.Int64  // messages that were confirmed
	repeated atomic.Int64  // publishes that were not
}

func newProducer(s settings, orders, copies int, seed uint64) (*producer, error) {
	p := &producer{topic: s.ordersTopic(), released: make(chan struct{}, orders*copies)}
	random := rand.New(rand.NewPCG(seed, 1))
	for i := range orders {
		o := order{OrderID: fmt.Sprintf("order-%05d", i+1), Customer: fmt.Sprintf("customer-%d", i%10), AmountCents: 100 + random.Int64N(50_000)}
		p.sum += o.AmountCents
		payload, err := json.Marshal(o)
		if err != nil {
			return nil, err
		}
		msg := message.NewMessage(watermill.NewUUID(), payload)
		for range copies {
			p.messages = append(p.messages, msg)
		}
	}
	random.Shuffle(len(p.messages), func(i, j int) { p.messages[i], p.messages[j] = p.messages[j], p.messages[i] })

	config := amqp.NewDurableQueueConfig(s.amqpURI)
	config.Marshaler = inboxamqp.Marshaler{}
	config.Publish.ConfirmDelivery = true
	config.Connection.Reconnect = reconnect
	var err error
	p.publisher, err = amqp.NewPublisher(config, watermill.NopLogger{})
	return p, err
}

// release lets the messages up to a part of all be published.
func (p *producer) release(part, of int) {
	for ; p.sent < len(p.messages)*part/of; p.sent++ {
		p.released <- struct{}{}
	}
}

// run returns when all messages are confirmed.
func (p *producer) run(ctx context.Context) error {
	work := make(chan *message.Message)
	var publishers sync.WaitGroup
	for range 4 {
		publishers.Go(func() {
			for msg := range work {
				p.publish(ctx, msg)
			}
		})
	}
	defer publishers.Wait()
	defer close(work)
	for _, msg := range p.messages {
		select {
		case <-p.released:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		select {
		case work <- msg:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (p *producer) publish(ctx context.Context, msg *message.Message) {
	for ctx.Err() == nil {
		p.inFlight.Add(1)
		err := p.publisher.Publish(p.topic, msg)
		p.inFlight.Add(-1)
		if err == nil {
			p.stored.Add(1)
			_ = pause(ctx, 5*time.Millisecond)
			return
		}
		p.repeated.Add(1)
		_ = pause(ctx, 100*time.Millisecond)
	}
}

// waitForPublish waits until there are publishes without an answer, for a while.
func (p *producer) waitForPublish(ctx context.Context) int64 {
	for begin := time.Now(); time.Since(begin) < time.Second && ctx.Err() == nil; time.Sleep(50 * time.Microsecond) {
		if n := p.inFlight.Load(); n > 1 {
			return n
		}
	}
	return p.inFlight.Load()
}

func (p *producer) close() { _ = p.publisher.Close() }
