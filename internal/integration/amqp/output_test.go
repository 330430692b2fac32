package amqp_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inbox "github.com/devmappa/watermill-inbox"
	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
	"github.com/devmappa/watermill-inbox/inboxtest"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// outage may be made longer to see what becomes of the messages: -args -outage 2m.
var outage = flag.Duration("outage", 2*time.Second, "how long the output's publisher is away")

// awayPublisher fails until a time.
type awayPublisher struct {
	message.Publisher
	until time.Time
}

func (p *awayPublisher) Publish(topic string, messages ...*message.Message) error {
	if time.Now().Before(p.until) {
		return errors.New("the output is away")
	}
	return p.Publisher.Publish(topic, messages...)
}

// While the output's publisher is away, no input on a quorum queue uses up its deliveries, and every event arrives: by the
// router when the publisher is back, or by the relay.
func TestOutputAwayOnAQuorumQueue(t *testing.T) {
	t.Parallel()
	const inputs, limit, inFlight = 50, 20, 10
	for _, instances := range []int{1, 3} {
		t.Run(fmt.Sprint(instances, " instances"), func(t *testing.T) {
			t.Parallel()
			s := newService(t, quorumWithLimit(limit, ""))
			events := s.name("events")
			s.declare(events, nil)
			for n := range inputs {
				s.publish(s.queue, amqp091.Publishing{MessageId: strconv.Itoa(n)})
			}
			var deliveries, transactions, runs atomic.Int32
			repository := inboxtest.NewFaultRepository(s.db.Repository(t, inboxsql.Options{}), func(point inboxtest.FaultPoint, _ inbox.Key) error {
				if point == inboxtest.AfterClaim {
					transactions.Add(1)
				}
				return nil
			})
			away := &awayPublisher{s.broker.publisher(s.config(nil)), time.Now().Add(*outage)}
			for range instances {
				once, err := inbox.NewMiddleware(repository, inbox.Options{})
				if err != nil {
					t.Fatal(err)
				}
				subscriber, err := inboxamqp.Concurrent(s.subscriber(s.config(s.arguments), watermill.NopLogger{}), inFlight)
				if err != nil {
					t.Fatal(err)
				}
				stop := startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
					router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
						return func(msg *message.Message) ([]*message.Message, error) {
							deliveries.Add(1)
							return h(msg)
						}
					})
					if err := once.AddTo(router, inbox.RouterOptions{Timeout: patience}); err != nil {
						t.Error(err)
					}
					router.AddHandler(handlerName, s.queue, subscriber, events, away, func(msg *message.Message) ([]*message.Message, error) {
						runs.Add(1)
						return []*message.Message{message.NewMessage("event-of-"+msg.UUID, nil)}, s.write(msg)
					})
				})
				t.Cleanup(func() {
					ctx, cancel := context.WithTimeout(context.Background(), patience)
					defer cancel()
					if err := once.Close(ctx); err != nil {
						t.Error(err)
					}
				})
				t.Cleanup(stop)
			}
			published := map[string]int{}
			for deadline := time.Now().Add(*outage + patience); len(published) < inputs && time.Now().Before(deadline); {
				event, ok := s.get(events)
				if ok {
					published[event.MessageId]++
				} else {
					time.Sleep(10 * time.Millisecond) // the queue says nothing by itself
				}
			}
			t.Logf("the output is away for %s: %d inputs handled, %d events published, %d deliveries, %d transactions", *outage, runs.Load(), len(published), deliveries.Load(), transactions.Load())
			if len(published) != inputs || runs.Load() != inputs {
				t.Errorf("%d events are published and the handler ran %d times, want %d", len(published), runs.Load(), inputs)
			}
			if *outage <= 10*time.Second && (deliveries.Load() != inputs || transactions.Load() != inputs) {
				t.Errorf("%d deliveries and %d transactions for %d inputs", deliveries.Load(), transactions.Load(), inputs)
			}
		})
	}
}

// A router that is closed while a publish backs off ends at once, and the message is where it was.
func TestShutdownDuringTheBackOff(t *testing.T) {
	t.Parallel()
	s := newService(t, quorum())
	events := s.name("events")
	s.declare(events, nil)
	s.publish(s.queue, amqp091.Publishing{MessageId: "m"})
	for _, back := range []bool{false, true} {
		publisher := &awayPublisher{s.broker.publisher(s.config(nil)), time.Now().Add(time.Hour)} // the router closes it
		if back {
			publisher.until = time.Time{}
		}
		tried := make(chan struct{}, 100)
		once, err := inbox.NewMiddleware(s.db.Repository(t, inboxsql.Options{}), inbox.Options{})
		if err != nil {
			t.Fatal(err)
		}
		stop := startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
			if err := once.AddTo(router, inbox.RouterOptions{}); err != nil {
				t.Error(err)
			}
			router.AddPublisherDecorators(func(publisher message.Publisher) (message.Publisher, error) {
				return noticedPublisher{publisher, tried}, nil
			})
			router.AddHandler(handlerName, s.queue, s.subscriber(s.config(s.arguments), watermill.NopLogger{}), events, publisher,
				func(msg *message.Message) ([]*message.Message, error) {
					return []*message.Message{message.NewMessage("event", nil)}, s.write(msg)
				})
		})
		await(t, tried, "a try to publish")
		if back {
			if got := s.take(events); got.MessageId != "event" {
				t.Errorf("published %q", got.MessageId)
			}
		}
		begin := time.Now()
		stop()
		if took := time.Since(begin); took > maxShutdown {
			t.Errorf("router.Close took %s", took)
		} else {
			t.Logf("router.Close took %s", took.Round(time.Millisecond))
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		if err := once.Close(ctx); err != nil {
			t.Error(err)
		}
		cancel()
	}
	s.wantEffects("m")
	s.mustBeEmpty(s.queue)
}

// noticedPublisher tells of each try.
type noticedPublisher struct {
	message.Publisher
	tried chan struct{}
}

func (p noticedPublisher) Publish(topic string, messages ...*message.Message) error {
	defer func() { p.tried <- struct{}{} }()
	return p.Publisher.Publish(topic, messages...)
}
