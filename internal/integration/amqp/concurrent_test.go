package amqp_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

func (b *broker) concurrent(n int, arguments amqp091.Table) message.Subscriber {
	b.Helper()
	subscriber, err := inboxamqp.Concurrent(b.subscriber(b.config(arguments), watermill.NopLogger{}), n)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = subscriber.Close() })
	return subscriber
}

func TestConcurrentHandlersRunAtOnce(t *testing.T) {
	t.Parallel()
	const n, total = 4, 40
	b := newBroker(t)
	queue := b.name("queue")
	subscriber := b.concurrent(n, nil)
	if err := subscriber.(message.SubscribeInitializer).SubscribeInitialize(queue); err != nil {
		t.Fatal(err)
	}
	for i := range total {
		b.publish(queue, amqp091.Publishing{MessageId: fmt.Sprint(i)})
	}

	var inFlight, most atomic.Int32
	var barrier sync.WaitGroup
	barrier.Add(n)
	open := make(chan struct{})
	go func() { barrier.Wait(); close(open) }()

	var entered atomic.Int32
	var handled settling
	ids := make(chan string, total)
	stop := startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
		router.AddConsumerHandler("consumer", queue, subscriber, func(msg *message.Message) error {
			for now := inFlight.Add(1); ; {
				if seen := most.Load(); now <= seen || most.CompareAndSwap(seen, now) {
					break
				}
			}
			defer inFlight.Add(-1)
			if entered.Add(1) <= n {
				barrier.Done()
			}
			<-open
			handled.add(msg)
			ids <- msg.UUID
			return nil
		})
	})
	await(t, open, fmt.Sprintf("%d handlers to run at once", n))

	seen := map[string]int{}
	for i := range total {
		seen[await(t, ids, fmt.Sprintf("message %d of %d", i+1, total))]++
	}
	handled.wait(t)
	stop()
	if len(seen) != total {
		t.Errorf("%d different messages, want %d", len(seen), total)
	}
	if most.Load() != n {
		t.Errorf("%d in flight, want %d", most.Load(), n)
	}
	b.mustBeEmpty(queue)
}

func TestConcurrentCloseInMidFlightRedelivers(t *testing.T) {
	t.Parallel()
	const n, total = 4, 20
	for name, arguments := range map[string]amqp091.Table{"classic": nil, "quorum": quorum()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBroker(t)
			queue := b.name("queue")
			b.declare(queue, arguments)
			for i := range total {
				b.publish(queue, amqp091.Publishing{MessageId: fmt.Sprint(i)})
			}

			inHand := make(chan string, total)
			stop := startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
				router.AddConsumerHandler("consumer", queue, b.concurrent(n, arguments), func(msg *message.Message) error {
					inHand <- msg.UUID
					<-msg.Context().Done()
					return msg.Context().Err()
				})
			})
			interrupted := map[string]bool{}
			for i := range n {
				interrupted[await(t, inHand, fmt.Sprintf("message %d in hand", i+1))] = true
			}
			stop()
			close(inHand)
			for late := range inHand { // taken while the router was closing
				interrupted[late] = true
			}
			if ready := b.ready(queue); ready != total {
				t.Fatalf("%d messages in the queue after Close, want all %d", ready, total)
			}

			messages, stopCollecting := collect(t, b.concurrent(n, arguments), queue)
			seen := map[string]bool{}
			for len(seen) < total {
				msg := await(t, messages, fmt.Sprintf("message %d of %d", len(seen)+1, total))
				if seen[msg.UUID] {
					t.Errorf("%s twice", msg.UUID)
				}
				seen[msg.UUID] = true
				if interrupted[msg.UUID] && msg.Metadata[inboxamqp.RedeliveredKey] != "true" {
					t.Errorf("%s was interrupted and is not marked as redelivered: %q", msg.UUID, msg.Metadata)
				}
			}
			stopCollecting()
			b.mustBeEmpty(queue)
		})
	}
}
