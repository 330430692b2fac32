package main

import (
	"context"
	"fmt"
)

const (
	growth        = "growth"
	growthWorkers = 16
	emptyTable    = "empty table"
	filledTable   = "filled table"
)

// addGrowth compares a filled table with an empty one, by the fused inboxsql without a network and with many
// workers, where the database's own work shows most.
func (b *bench) addGrowth(ctx context.Context) error {
	s := &section{name: growth, title: fmt.Sprintf("Growth: %d records in the table, relative to none; %s, %s, %s",
		b.options.rows, inboxsqlFused.name, workersSetting(growthWorkers), networkTitles[direct])}
	for _, ids := range []idOrder{randomIDs, orderedIDs} {
		g, err := b.growthGroup(ctx, ids)
		if err != nil {
			return err
		}
		s.groups = append(s.groups, g)
	}
	b.add(s)
	return nil
}

func (b *bench) growthGroup(ctx context.Context, ids idOrder) (*group, error) {
	slice := slice{workers: growthWorkers, measured: b.options.slice, newID: ids.next}
	add := func(name string, baseline *subject) (*place, *subject, error) {
		p, err := b.addPlace(ctx, ids.name+", "+name, true)
		return p, &subject{name: name, baseline: baseline, rate: func(ctx context.Context) (float64, error) {
			return slice.rate(ctx, inboxsqlFused, p.url, p)
		}}, err
	}
	_, empty, err := add(emptyTable, nil)
	if err != nil {
		return nil, err
	}
	place, filled, err := add(filledTable, empty)
	if err != nil {
		return nil, err
	}
	return &group{
		setting:  ids.name,
		judged:   true,
		subjects: []*subject{empty, filled},
		before: func(ctx context.Context) error {
			if place.prefilled.Load() == 0 {
				if err := place.prefill(ctx, b.admin, ids, b.options.rows); err != nil {
					return err
				}
			}
			// The next change of each page is now a full one in the log, in both tables alike.
			_, err := b.admin.ExecContext(ctx, `CHECKPOINT`)
			return err
		},
	}, nil
}
