package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// ErrClosed is returned by Subscribe after Close.
var ErrClosed = errors.New("inboxamqp: subscriber is closed")

// Concurrent returns a subscriber that keeps up to n messages of a topic in flight: each Subscribe opens n
// subscriptions of the inner subscriber and merges them into one channel. A router handler on it is still
// one handler, so one consumer of the inbox; n handlers on one queue would be n consumers and apply
// every message that is delivered to two of them twice.
//
// The order of messages is not kept: n of them are handled at the same time.
//
// The subscriptions must share the messages of the topic, as those of watermill-amqp do when
// Config.Queue.GenerateName gives one name for all calls and neither Config.Queue.Exclusive nor
// Config.Consume.Exclusive is set. Subscribers that give each subscription a copy, like GoChannel, would deliver
// each message n times. Each subscription uses an AMQP channel, of which RabbitMQ allows 2047 on a connection by default.
//
// When one of the n subscriptions cannot be opened, Subscribe cancels the others and returns the error.
// The merged channel is closed when all n have ended. A message that nobody takes any more, because the
// context of Subscribe has ended or Close was called, is nacked.
//
// Close may be called more than once and concurrently. It closes the inner subscriber, returns its error and
// waits until all merged channels are closed, which needs an inner Close that closes its channels, as
// message.Subscriber demands. If the inner subscriber is a message.SubscribeInitializer, so is the result.
//
// It returns an error if the subscriber is nil or n is less than 1.
func Concurrent(subscriber message.Subscriber, n int) (message.Subscriber, error) {
	if subscriber == nil {
		return nil, errors.New("inboxamqp: subscriber is nil")
	}
	if n < 1 {
		return nil, fmt.Errorf("inboxamqp: %d concurrent subscriptions, need at least 1", n)
	}
	merged := &concurrent{inner: subscriber, n: n, closing: make(chan struct{})}
	if initializer, ok := subscriber.(message.SubscribeInitializer); ok {
		return &initializingConcurrent{merged, initializer}, nil
	}
	return merged, nil
}

type initializingConcurrent struct {
	*concurrent
	message.SubscribeInitializer
}

type concurrent struct {
	inner message.Subscriber
	n     int

	closeOnce sync.Once
	closeErr  error
	closing   chan struct{}

	// running counts Subscribe calls in progress and open merged channels. The lock keeps Add from
	// overtaking Wait.
	lock    sync.Mutex
	closed  bool
	running sync.WaitGroup
}

func (c *concurrent) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	c.lock.Lock()
	if c.closed {
		c.lock.Unlock()
		return nil, ErrClosed
	}
	c.running.Add(1)
	c.lock.Unlock()

	ctx, cancel := context.WithCancel(ctx)
	out := make(chan *message.Message)
	var forwarders sync.WaitGroup

	var err error
	for i := 1; i <= c.n; i++ {
		var in <-chan *message.Message
		if in, err = c.inner.Subscribe(ctx, topic); err != nil {
			err = fmt.Errorf("inboxamqp: subscription %d of %d: %w", i, c.n, err)
			cancel() // ends those opened so far; their forwarders nack what still arrives
			break
		}
		forwarders.Add(1)
		go func() {
			defer forwarders.Done()
			c.forward(ctx, in, out)
		}()
	}

	go func() {
		defer c.running.Done()
		forwarders.Wait()
		cancel()
		close(out)
	}()

	if err != nil {
		return nil, err
	}
	return out, nil
}

// forward returns when the inner subscription has closed its channel. Until then it keeps reading, so that
// an inner subscriber is never stuck with a message that nobody takes.
func (c *concurrent) forward(ctx context.Context, in <-chan *message.Message, out chan<- *message.Message) {
	for msg := range in {
		select {
		case out <- msg:
		case <-ctx.Done():
			msg.Nack()
		case <-c.closing:
			msg.Nack()
		}
	}
}

func (c *concurrent) Close() error {
	c.closeOnce.Do(func() {
		c.lock.Lock()
		c.closed = true
		c.lock.Unlock()

		close(c.closing)
		c.closeErr = c.inner.Close()
		c.running.Wait()
	})
	return c.closeErr
}
