package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// drain is one measurement of a consumer on a queue: a router with one handler empties it.
type drain struct {
	inFlight int
	messages int
}

// rate fills a queue and returns how many messages per second leave it. The clock starts when the pool's
// connections are there.
func (d drain) rate(ctx context.Context, b *broker, v variant, url string, p *place) (rate float64, err error) {
	c, err := v.open(ctx, url, d.inFlight)
	if err != nil {
		return 0, err
	}
	defer c.close()
	opening := warmUp * d.inFlight
	queue, err := b.fill(ctx, opening+d.messages)
	defer func() { err = errors.Join(err, b.drop(queue)) }()
	if err != nil {
		return 0, err
	}
	runtime.GC()

	var (
		handled  atomic.Int64
		started  = make(chan time.Time, 1)
		finished = make(chan time.Time, 1)
		failed   = make(chan error, 1)
	)
	stop, err := d.consume(ctx, b, queue, func(msg *message.Message) error {
		if err := c.handle(msg); err != nil {
			select {
			case failed <- err:
			default:
			}
			return err
		}
		p.processed.Add(1)
		switch int(handled.Add(1)) {
		case opening:
			started <- time.Now()
		case opening + d.messages:
			finished <- time.Now()
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	select {
	case at := <-finished:
		return float64(d.messages) / at.Sub(<-started).Seconds(), stop()
	case err := <-failed:
		return 0, errors.Join(err, stop())
	case <-ctx.Done():
		return 0, errors.Join(ctx.Err(), stop())
	}
}

// consume starts a consumer as people deploy it, with watermill-amqp's preset.
func (d drain) consume(ctx context.Context, b *broker, queue string, handler message.NoPublishHandlerFunc) (stop func() error, err error) {
	config := amqp.NewDurableQueueConfig(b.uri)
	config.Marshaler = inboxamqp.Marshaler{}
	inner, err := amqp.NewSubscriber(config, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	subscriber, err := inboxamqp.Concurrent(inner, d.inFlight)
	if err != nil {
		return nil, errors.Join(err, inner.Close())
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, watermill.NopLogger{})
	if err != nil {
		return nil, errors.Join(err, subscriber.Close())
	}
	router.AddConsumerHandler(consumerName, queue, subscriber, handler)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.WithoutCancel(ctx)) }()
	select {
	case <-router.Running():
	case err := <-ended:
		return nil, errors.Join(fmt.Errorf("the router did not start: %w", err), subscriber.Close())
	}
	return func() error { return errors.Join(router.Close(), <-ended) }, nil
}
