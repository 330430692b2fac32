package amqp_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// quorumWithLimit is a quorum queue that sends to the dead-letter queue what was delivered too often.
func quorumWithLimit(limit int, deadLetter string) amqp091.Table {
	arguments := quorum()
	arguments["x-delivery-limit"] = int32(limit)
	if deadLetter != "" {
		arguments["x-dead-letter-exchange"] = ""
		arguments["x-dead-letter-routing-key"] = deadLetter
	}
	return arguments
}

// A duplicate is acked. Nacked, it would use up its deliveries and be taken for bad.
func TestDuplicatesAreAcked(t *testing.T) {
	t.Parallel()
	const copies = 3
	for name, concurrency := range map[string]int{"one after the other": 0, "all at once": 1 + copies} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBroker(t)
			dead := b.name("dead")
			b.declare(dead, nil)
			s := newService(t, quorumWithLimit(3, dead))
			for range 1 + copies {
				s.publish(s.queue, amqp091.Publishing{MessageId: "m"})
			}
			var runs atomic.Int32
			i := s.start(setup{concurrency: concurrency, handler: func(msg *message.Message) error {
				runs.Add(1)
				if concurrency > 0 {
					s.waitForSessions(s.application, waitsForALock, copies)
				}
				return s.write(msg)
			}})
			for _, d := range i.wait(1 + copies) {
				if d.metadata[inboxamqp.DeliveryCountKey] != "" || d.metadata[inboxamqp.RedeliveredKey] != "" {
					t.Errorf("redelivered: %q", d.metadata)
				}
			}
			i.finish()
			b.mustBeEmpty(dead)
			s.wantPoisoned()
			s.wantEffects("m")
			if runs.Load() != 1 {
				t.Errorf("the handler ran %d times", runs.Load())
			}
			i.wantLines("processed", 1)
			i.wantLines("duplicate", copies)
			i.wantAttempts(1 + copies)
			s.wantNoOpenTransaction(s.application)
		})
	}
}

// What RabbitMQ redelivers carries headers that are no strings. It has to reach the inbox, as does what a
// publisher sends with a number in its headers.
func TestRedeliveryIsAppliedOnce(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(*testing.T) (s *service, configure func(*amqp.Config), countKeys []string){
		"quorum queue": func(t *testing.T) (*service, func(*amqp.Config), []string) {
			return newService(t, quorum()), nil, []string{inboxamqp.DeliveryCountKey, inboxamqp.AcquiredCountKey}
		},
		"classic queue with a dead-letter retry": func(t *testing.T) (*service, func(*amqp.Config), []string) {
			s := newService(t, nil)
			s.queue, s.arguments = retryTopology(s.broker)
			return s, func(c *amqp.Config) { c.Consume.NoRequeueOnNack = true }, []string{inboxamqp.DeathKey}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, configure, countKeys := prepare(t)
			number := amqp091.Table{"attempt": int32(7)}
			s.publish(s.queue, amqp091.Publishing{MessageId: "m", Headers: number})

			var runs atomic.Int32
			i := s.start(setup{
				inboxOnly: true, // so that the broker redelivers
				configure: configure,
				handler: func(msg *message.Message) error {
					if err := s.write(msg); err != nil {
						return err
					}
					if got := msg.Metadata["attempt"]; got != "7" {
						t.Errorf("the number arrives as %q", got)
					}
					if runs.Add(1) == 1 {
						return errHandler
					}
					return nil
				},
			})
			if first := await(t, i.deliveries, "the first delivery"); first.err != errHandler {
				t.Errorf("the first delivery was answered with %v", first.err)
			}
			second := i.wait(1)[0]
			if !slices.ContainsFunc(countKeys, func(key string) bool { return second.metadata[key] != "" }) {
				t.Errorf("the second delivery has none of %q: %q", countKeys, second.metadata)
			}
			s.publish(s.queue, amqp091.Publishing{MessageId: "m", Headers: number})
			i.wait(1)
			i.finish()
			s.wantEffects("m")
			if runs.Load() != 2 {
				t.Errorf("the handler ran %d times, want 2", runs.Load())
			}
			i.wantLines("failed", 1)
			i.wantLines("processed", 1)
			i.wantLines("duplicate", 1)
		})
	}
}

// Many copies in any order, several at a time, with a handler that fails in several ways.
func TestConcurrentCopiesOfManyMessages(t *testing.T) {
	t.Parallel()
	const messages, copies, inFlight = 200, 3, 4
	s := newService(t, quorumWithLimit(20, ""))
	var want []string
	var publishings []amqp091.Publishing
	for m := range messages {
		want = append(want, fmt.Sprintf("%03d", m))
		for range copies {
			publishings = append(publishings, amqp091.Publishing{MessageId: want[m], DeliveryMode: amqp091.Persistent})
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rand.New(rand.NewPCG(seed, 0)).Shuffle(len(publishings), func(i, j int) {
		publishings[i], publishings[j] = publishings[j], publishings[i]
	})
	s.publishAll(s.queue, publishings)

	var runs [messages]atomic.Int32
	i := s.start(setup{concurrency: inFlight, handler: func(msg *message.Message) error {
		m, err := strconv.Atoi(msg.UUID)
		if err != nil {
			return err
		}
		if err := s.write(msg); err != nil {
			return err
		}
		if first := runs[m].Add(1) == 1; !first {
			return nil
		}
		switch m % 30 { // a tenth of the messages, each at its first run
		case 0:
			return errHandler
		case 10:
			panic("handler panics")
		case 20:
			_ = s.db.Write(msg.Context(), "a\x00b") // PostgreSQL refuses it and the transaction
		}
		return nil
	}})
	i.wait(messages * copies)
	i.finish()

	s.wantPoisoned()
	s.wantEffects(want...)
	for m := range runs {
		wantRuns := int32(1)
		if m%10 == 0 {
			wantRuns = 2
		}
		if got := runs[m].Load(); got != wantRuns {
			t.Errorf("the handler ran %d times for message %d, want %d", got, m, wantRuns)
		}
	}
	i.wantLines("failed", messages/10)
	i.wantLines("processed", messages)
	i.wantLines("duplicate", messages*(copies-1))
	s.wantNoOpenTransaction(s.application)
}
