//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// load is what is sent.
type load struct {
	messages  []amqp091.Publishing
	sum       int64           // of all payments, each counted once, in cents
	malformed map[string]bool // message ids
}

// newLoad makes payments and copies and mixes them. Every fifth payment comes from a publisher that does
// not use Watermill: it has an AMQP message-id and no header.
func newLoad(o options) load {
	l := load{malformed: make(map[string]bool)}
	for i := range o.payments {
		cents := 100 + rand.Int64N(50_000)
		l.sum += cents
		publishing := newPublishing(watermill.NewUUID(), i%5 == 0, fmt.Sprintf(
			`{"payment_id":"payment-%06d","account":"account-%02d","amount_cents":%d}`, i+1, i%10, cents))
		for range o.copies {
			l.messages = append(l.messages, publishing)
		}
	}
	for range malformed {
		id := watermill.NewUUID()
		l.malformed[id] = true
		l.messages = append(l.messages, newPublishing(id, false, `{"payment_id":`))
	}
	rand.Shuffle(len(l.messages), func(i, j int) {
		l.messages[i], l.messages[j] = l.messages[j], l.messages[i]
	})
	return l
}

func newPublishing(id string, foreign bool, payload string) amqp091.Publishing {
	if foreign {
		return amqp091.Publishing{MessageId: id, DeliveryMode: amqp091.Persistent, Body: []byte(payload)}
	}
	publishing, err := inboxamqp.Marshaler{}.Marshal(message.NewMessage(id, []byte(payload)))
	if err != nil {
		panic(err) // there is no metadata that could be refused
	}
	return publishing
}

// publish puts the messages into the queue and waits until the broker has confirmed all of them.
func (s *stage) publish(ctx context.Context, messages []amqp091.Publishing) error {
	return s.onChannel(func(channel *amqp091.Channel) error {
		if err := channel.Confirm(false); err != nil {
			return err
		}
		var confirmations []*amqp091.DeferredConfirmation
		for _, publishing := range messages {
			confirmation, err := channel.PublishWithDeferredConfirmWithContext(ctx, "", s.name, false, false, publishing)
			if err != nil {
				return err
			}
			confirmations = append(confirmations, confirmation)
		}
		for _, confirmation := range confirmations {
			if confirmed, err := confirmation.WaitContext(ctx); err != nil {
				return err
			} else if !confirmed {
				return errors.New("the broker refused a message")
			}
			s.published.Add(1)
		}
		return nil
	})
}
