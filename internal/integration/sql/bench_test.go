package sql_test

import (
	"context"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// unmarked is a repository that marks nothing.
type unmarked struct{ inbox.Repository }

func (unmarked) MarkSent(context.Context, []inbox.Record) ([]inbox.Record, error) { return nil, nil }

// BenchmarkMarking shows that marking is off the path of the message: from the delivery to the
// acknowledgement, with and without it.
func BenchmarkMarking(b *testing.B) {
	for _, name := range []string{"without", "with"} {
		b.Run(name, func(b *testing.B) {
			db := testdb.PostgreSQL(b, "postgres")
			var repository inbox.Repository = db.Repository(b, inboxsql.Options{})
			if name == "without" {
				repository = unmarked{repository}
			}
			a := newApp(b, db, repository, inbox.Options{})
			a.router.AddMiddleware(a.inbox.Middleware)
			a.router.AddHandler("book", "payments", a.broker, "events", &discard{}, func(msg *message.Message) ([]*message.Message, error) {
				return []*message.Message{newMessage("event")}, nil
			})
			a.run()
			b.ResetTimer()
			for i := range b.N {
				if err := a.broker.Publish("payments", newMessage(testdb.RandomName())); err != nil {
					b.Fatal(i, err)
				}
			}
			b.StopTimer()
			a.stop()
		})
	}
}

type discard struct{}

func (discard) Publish(string, ...*message.Message) error { return nil }
func (discard) Close() error                              { return nil }
